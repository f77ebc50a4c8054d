#include "clients/cli/text/demangle.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "clients/cli/text/limits.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::cli {
namespace {

/// In the child: writes what the symbol stands for, or nothing.
[[noreturn]] void demangle_into(int pipe, const char* symbol) {
    ::signal(SIGPROF, SIG_DFL);
    const auto us = std::chrono::microseconds{limits::demangling}.count();
    const itimerval limit{{}, {us / 1'000'000, us % 1'000'000}};
    if (::setitimer(ITIMER_PROF, &limit, nullptr) != 0) ::_exit(1);
    int status = 0;
    if (const char* text = abi::__cxa_demangle(symbol, nullptr, nullptr, &status); text != nullptr && status == 0)
        (void)!::write(pipe, text, std::min(std::strlen(text), limits::demangled_bytes_max));  // less than a pipe holds
    ::_exit(0);
}

/// Empty when it cannot be told in time.
std::string demangled(const std::string& symbol) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
    const UniqueFd read_end{ends[0]};
    UniqueFd write_end{ends[1]};
    const pid_t child = ::fork();
    if (child < 0) return {};
    if (child == 0) demangle_into(write_end.get(), symbol.c_str());
    write_end.reset();
    std::string text(limits::demangled_bytes_max, '\0');
    ssize_t size = 0;
    do size = ::read(read_end.get(), text.data(), text.size());
    while (size < 0 && errno == EINTR);
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    return text;
}

}  // namespace

std::string demangled_frame(std::string_view frame) {
    if (!frame.starts_with("_Z")) return std::string{frame};
    const std::size_t end = std::min({frame.find('+'), frame.find(' '), frame.size()});
    const std::string text = demangled(std::string{frame.substr(0, end)});
    return text.empty() ? std::string{frame} : text + std::string{frame.substr(end)};
}

}  // namespace bulkhead::cli
