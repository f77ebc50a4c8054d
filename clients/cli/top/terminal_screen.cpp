#include "clients/cli/top/terminal_screen.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace bulkhead::cli::top {
namespace {

/// Alternate screen, cursor hidden, no wrapping at the right edge.
constexpr std::string_view enter_codes = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H\x1b[2J";
constexpr std::string_view leave_codes = "\x1b[?7h\x1b[?25h\x1b[?1049l";

Result<> write_all(std::string_view text) {
    while (!text.empty()) {
        const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return system_error("writing to the terminal", errno);
        text.remove_prefix(static_cast<std::size_t>(written));
    }
    return {};
}

}  // namespace

Result<Signals> Signals::open() {
    sigset_t wanted;
    sigset_t before;
    ::sigemptyset(&wanted);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH}) ::sigaddset(&wanted, number);
    UniqueFd fd{::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK)};
    if (!fd) return system_error("waiting for signals", errno);
    ::pthread_sigmask(SIG_BLOCK, &wanted, &before);
    return Signals{std::move(fd), before};
}

Signals::Signals(Signals&& other) noexcept : fd_{std::move(other.fd_)}, before_{other.before_} {}

Signals::~Signals() {
    if (fd_) ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

int Signals::take() {
    signalfd_siginfo info{};
    return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

Result<TerminalScreen> TerminalScreen::open(bool colours) {
    termios before{};
    if (::tcgetattr(STDIN_FILENO, &before) != 0 || ::isatty(STDOUT_FILENO) != 1)
        return Error{ErrorCode::input_invalid, "drawing a screen: standard input and output are not a terminal",
                     "use --once"};
    TerminalScreen screen{before, colours};
    screen.enter();
    return screen;
}

TerminalScreen::TerminalScreen(TerminalScreen&& other) noexcept
    : before_{other.before_}, colours_{other.colours_}, entered_{std::exchange(other.entered_, false)},
      shown_{std::move(other.shown_)} {}

TerminalScreen::~TerminalScreen() { leave(); }

void TerminalScreen::enter() {
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // Ctrl-C and Ctrl-Z stay signals
    raw.c_iflag &= ~static_cast<tcflag_t>(ICRNL | IXON);
    raw.c_cc[VMIN] = 0;
    raw.c_cc[VTIME] = 0;
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    (void)write_all(enter_codes);
    entered_ = true;
    forget();
}

void TerminalScreen::leave() {
    if (!std::exchange(entered_, false)) return;
    (void)write_all(leave_codes);
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
        // Erased first: after a line that reaches the right edge, the cursor is still on its last character.
        text += fmt::format("\x1b[{};1H\x1b[2K{}", i + 1, frame[i].painted(colours_));
    }
    shown_ = std::move(frame);
    return write_all(text);
}

}  // namespace bulkhead::cli::top
