#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

namespace bulkhead::supervisor {

/// A destination of log lines.
class LogTarget {
public:
    virtual ~LogTarget() = default;
    /// Returns once the disk or the terminal has taken the lines, however long that takes.
    virtual void append(std::string_view lines) = 0;
};

/// A thread that writes logs and small files, so that a hanging disk or terminal (Ctrl-S) blocks
/// no other thread.
///
/// Order   lines of one target stay in order
/// Bound   `log_waiting_bytes_max`: beyond it the oldest lines are dropped; their count is written
///         in their place
/// Lost    also what waits when the process is killed, or when it ends and the disk has not taken
///         it within `log_flush_deadline`
/// Thread  any
class LogWriter {
public:
    LogWriter();
    /// Calls `end`.
    ~LogWriter();
    LogWriter(const LogWriter&) = delete;
    LogWriter& operator=(const LogWriter&) = delete;

    /// `lines`  whole lines, each with its newline
    void append(std::shared_ptr<LogTarget> target, std::string lines);
    /// Runs `save` on the thread, unless a newer one of this name replaces it before its turn.
    void save(std::string name, std::function<void()> save);

    /// Waits until all is written. False: not within `log_flush_deadline`.
    [[nodiscard]] bool flush() const;
    /// Flushes, then drops what waits and ignores later lines. False: the thread hangs and may
    /// return at any time, so leave by _Exit().
    [[nodiscard]] bool end();

    /// Number of lines lost.
    [[nodiscard]] std::uint64_t lost() const;

private:
    struct State;
    void wake();
    static void work(State& state);

    std::shared_ptr<State> state_;  ///< shared with a thread that may outlive this object
    std::thread thread_;            ///< started by the first line
};

/// A folder for logs, and its writer.
struct LogStore {
    std::filesystem::path folder;
    std::shared_ptr<LogWriter> writer;
};

}  // namespace bulkhead::supervisor
