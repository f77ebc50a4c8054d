#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

namespace bulkhead::supervisor {

/// Where lines end up.
class LogTarget {
public:
    virtual ~LogTarget() = default;
    /// Returns when the disk or the terminal has taken them, whenever that is.
    virtual void append(std::string_view lines) = 0;
};

/// A thread that writes logs and small files, so that a disk or a terminal that hangs (Ctrl-S) stops nobody else.
///
/// Order   as handed over, of one target's lines
/// Bound   `log_waiting_bytes_max`: of more the oldest lines are lost, which is counted, and told in their place
/// Lost    besides, what waits when the process is killed, or when it ends and the disk has not taken it in
///         `log_flush_deadline`
/// Thread  any
class LogWriter {
public:
    LogWriter();
    /// As `end`.
    ~LogWriter();
    LogWriter(const LogWriter&) = delete;
    LogWriter& operator=(const LogWriter&) = delete;

    /// `lines`  whole ones, each with its newline
    void append(std::shared_ptr<LogTarget> target, std::string lines);
    /// Runs `save`, unless a newer one of this name comes before its turn.
    void save(std::string name, std::function<void()> save);

    /// Waits until all is written. False: not within `log_flush_deadline`.
    [[nodiscard]] bool flush() const;
    /// As `flush`, then what waits is dropped and what comes later ignored. False: the thread hangs and may come back
    /// at any time, so leave by _Exit().
    [[nodiscard]] bool end();

    /// Lines.
    [[nodiscard]] std::uint64_t lost() const;

private:
    struct State;
    void wake();
    static void work(State& state);

    std::shared_ptr<State> state_;  ///< shared with a thread that may outlive this
    std::thread thread_;            ///< started by the first line
};

/// A folder for logs, and who writes there.
struct LogStore {
    std::filesystem::path folder;
    std::shared_ptr<LogWriter> writer;
};

}  // namespace bulkhead::supervisor
