#include "clients/cli/top/terminal_screen.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/whole_io.h"

namespace bulkhead::cli::top {
namespace {

/// Alternate screen, cursor hidden, no wrapping at the right edge.
constexpr std::string_view enter_codes = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H\x1b[2J";
constexpr std::string_view leave_codes = "\x1b[?7h\x1b[?25h\x1b[?1049l";

bool write_text(std::string_view text) { return write_all(STDOUT_FILENO, std::as_bytes(std::span{text})); }

}  // namespace

TerminalScreen::TerminalScreen(bool colours) : colours_{colours} {
    if (::tcgetattr(STDIN_FILENO, &before_) != 0 || ::isatty(STDOUT_FILENO) != 1)
        throw ErrorException{
            {ErrorCode::input_invalid, "drawing a screen: standard input and output are not a terminal", "use --once"}};
    enter();
}

void TerminalScreen::enter() {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // Ctrl-C and Ctrl-Z stay signals
    raw.c_iflag &= ~static_cast<tcflag_t>(ICRNL | IXON);
    raw.c_cc[VMIN] = 0;
    raw.c_cc[VTIME] = 0;
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    (void)write_text(enter_codes);
    entered_ = true;
    forget();
}

void TerminalScreen::leave() {
    if (!std::exchange(entered_, false)) return;
    (void)write_text(leave_codes);
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
}

TerminalScreen::Size TerminalScreen::size() const {
    winsize size{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return {80, 24};
    return {size.ws_col, size.ws_row};
}

Result<> TerminalScreen::show(Frame frame) {
    std::string text{shown_ ? "" : "\x1b[2J"};
    for (std::size_t i = 0; i < frame.size(); ++i) {
        if (shown_ && i < shown_->size() && (*shown_)[i] == frame[i]) continue;
        // Erased first: after a line that reaches the right edge, the cursor is still on its
        // last character.
        text += fmt::format("\x1b[{};1H\x1b[2K{}", i + 1, frame[i].painted(colours_));
    }
    shown_ = std::move(frame);
    return write_text(text) ? Result<>{} : Result<>{system_error("writing to the terminal", errno)};
}

}  // namespace bulkhead::cli::top
