#pragma once

#include <termios.h>

#include <optional>

#include "clients/cli/top/canvas.h"
#include "ipc/base/error.h"

namespace bulkhead::cli::top {

/// The terminal of standard input and output, in raw mode: keys arrive at once without echo, on an
/// alternate screen without a cursor. The destructor restores it.
class TerminalScreen {
public:
    struct Size {
        std::size_t columns;
        std::size_t rows;
    };
    /// Throws  input_invalid if they are not a terminal
    explicit TerminalScreen(bool colours);
    TerminalScreen(const TerminalScreen&) = delete;
    TerminalScreen& operator=(const TerminalScreen&) = delete;
    ~TerminalScreen() { leave(); }

    [[nodiscard]] Size size() const;
    /// Writes the lines that changed. Errors  internal: the terminal accepts no output
    [[nodiscard]] Result<> show(Frame frame);
    /// Makes the next `show` write all lines.
    void forget() { shown_.reset(); }
    /// Returns the screen to the shell; `enter` takes it back.
    void leave();
    void enter();

private:
    termios before_{};
    bool colours_;
    bool entered_ = false;
    std::optional<Frame> shown_;
};

}  // namespace bulkhead::cli::top
