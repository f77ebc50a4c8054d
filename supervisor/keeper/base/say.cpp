#include "supervisor/keeper/base/say.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>

#include "supervisor/keeper/base/limits.h"

namespace bulkhead::keeper {

void say(const char* format, ...) noexcept {
    std::array<char, limits::log_line_bytes_max> line{};
    std::va_list arguments;
    va_start(arguments, format);
    const int wanted = std::vsnprintf(line.data(), line.size() - 1, format, arguments);
    va_end(arguments);
    if (wanted < 0) return;
    std::size_t size = std::min(static_cast<std::size_t>(wanted), line.size() - 2);
    line[size++] = '\n';

    pollfd error_stream{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&error_stream, 1, 0) != 1 || (error_stream.revents & POLLOUT) == 0) return;
    if (::write(STDERR_FILENO, line.data(), size) < 0) return;  // there is nowhere to report it
}

}  // namespace bulkhead::keeper
