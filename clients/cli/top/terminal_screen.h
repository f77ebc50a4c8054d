#pragma once

#include <sys/signalfd.h>
#include <termios.h>

#include <optional>
#include <string>

#include "clients/cli/top/canvas.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::cli::top {

/// Signals that end or resize a full-screen program, as a descriptor to poll. The destructor lets them act again; a
/// signal that came and was not taken then acts.
class Signals {
public:
    /// Errors  resources_exhausted
    static Result<Signals> open();
    Signals(Signals&& other) noexcept;
    Signals& operator=(Signals&&) = delete;
    ~Signals();

    [[nodiscard]] int fd() const { return fd_.get(); }
    /// The next one that came; 0 when there is none.
    [[nodiscard]] int take();

private:
    Signals(UniqueFd fd, sigset_t before) : fd_{std::move(fd)}, before_{before} {}
    UniqueFd fd_;
    sigset_t before_;
};

/// The terminal of standard input and output: keys at once, nothing echoed, an alternate screen without a cursor. The
/// destructor brings everything back.
class TerminalScreen {
public:
    struct Size {
        std::size_t columns;
        std::size_t rows;
    };
    /// Errors  input_invalid where they are not a terminal
    static Result<TerminalScreen> open(bool colours);
    TerminalScreen(TerminalScreen&& other) noexcept;
    TerminalScreen& operator=(TerminalScreen&&) = delete;
    ~TerminalScreen();

    [[nodiscard]] Size size() const;
    /// Writes the lines that changed. Errors  internal: the terminal takes nothing any more
    [[nodiscard]] Result<> show(Frame frame);
    /// The next `show` writes all lines.
    void forget() { shown_.reset(); }
    /// Leaves the screen to the shell, and comes back.
    void leave();
    void enter();

private:
    TerminalScreen(termios before, bool colours) : before_{before}, colours_{colours} {}
    termios before_;
    bool colours_;
    bool entered_ = false;
    std::optional<Frame> shown_;
};

}  // namespace bulkhead::cli::top
