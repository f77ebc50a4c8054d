#include "tests/fakes/minimal_worker/mischief.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "ipc/base/unique_fd.h"

namespace bulkhead::worker {
namespace {

std::string_view environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

/// Complete at once for who reads the folder meanwhile.
Result<> hold_in(std::string folder, std::string_view bytes) {
    const std::string of_gpu = fmt::format("{}/{}", folder, environment("CUDA_VISIBLE_DEVICES"));
    if (::access(of_gpu.c_str(), F_OK) == 0) folder = of_gpu;
    const std::string path = fmt::format("{}/{}", folder, ::getpid());
    std::ofstream{path + ".new"} << bytes;
    if (std::rename((path + ".new").c_str(), path.c_str()) != 0) return system_error("writing " + path, errno);
    return {};
}

}  // namespace

Result<> occupy_fake_gpu() {
    if (const std::string folder{environment("MINIMAL_GPU_HELD_IN")}; !folder.empty())
        return hold_in(folder, environment("MINIMAL_GPU_BYTES"));
    const std::string path{environment("MINIMAL_GPU_FILE")};
    if (path.empty()) return {};
    std::ifstream machine{path};
    for (std::string line; std::getline(machine, line);)
        if (line.starts_with("process 0 "))
            return Error{ErrorCode::out_of_memory, "taking memory of the GPU: there is " + line, {}};
    const std::string line = fmt::format("process 0 {} {} ghost\n", ::getpid(), environment("MINIMAL_GPU_BYTES"));
    const UniqueFd out{::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC)};
    if (!out || ::write(out.get(), line.data(), line.size()) < 0) return system_error("writing " + path, errno);
    return {};
}

Result<> occupy_context() {
    const std::string folder{environment("MINIMAL_GPU_HELD_IN")};
    return folder.empty() ? Result<>{} : hold_in(folder, environment("MINIMAL_GPU_CONTEXT"));
}

void leave_a_child() {
    const std::string_view how = environment("MINIMAL_CHILD");
    if (how.empty()) return;
    const pid_t child = ::fork();
    if (child != 0) {
        ::waitpid(child, nullptr, 0);
        return;
    }
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    fmt::print("pid {} is the grandchild\n", ::getpid());
    std::fflush(stdout);
    char name[] = "sleep";
    char time[] = "100000";
    char* argv[] = {name, time, nullptr};
    char* none[] = {nullptr};
    ::execve("/bin/sleep", argv, how == "bare" ? none : environ);
    ::_exit(127);
}

}  // namespace bulkhead::worker
