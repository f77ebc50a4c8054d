#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "tests/fakes/fake_cuda/fake.h"

namespace fake_cuda {

void note(const char* call, const void* stream, std::uint64_t object) {
    const char* const file = std::getenv("BULKHEAD_FAKE_CUDA_LOG");
    if (file == nullptr) return;
    std::ostringstream line;
    line << ::getpid() << ' ' << call << ' ' << reinterpret_cast<std::uintptr_t>(stream) << ' ' << object << '\n';
    const int fd = ::open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) std::abort();
    const std::string text = line.str();
    if (::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::abort();
    ::close(fd);
}

}  // namespace fake_cuda
