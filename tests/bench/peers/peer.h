#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ipc/base/unique_fd.h"

namespace bulkhead::bench {

/// What a peer should have said did not come: it is to be left out, with this reason.
class PeerLost : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// A program of a bench: a client that speaks `rounds.h`, or a server.
///
/// Owns    the process: the destructor ends it by the end of file on its stdin, then by SIGTERM,
///         then by SIGKILL
/// Errors  PeerLost, once it was ready
class Peer {
public:
    /// `environment` holds "NAME=value", on top of this process' own.
    explicit Peer(std::vector<std::string> argv, const std::vector<std::string>& environment = {});
    Peer(Peer&&) noexcept;
    Peer& operator=(Peer&&) = delete;
    ~Peer();

    [[nodiscard]] pid_t pid() const noexcept { return pid_; }
    /// It, its children, theirs.
    [[nodiscard]] std::vector<pid_t> family() const;

    /// Waits for the end of its warm-up.
    /// Returns  why it cannot take part, did not start or ended early; empty: it can
    [[nodiscard]] std::string await_ready();
    void start_round(std::uint64_t budget_us);
    struct Round {
        std::vector<double> latencies_us;
        double begin_us;  ///< on CLOCK_MONOTONIC
        double end_us;
        double processor_us;
    };
    [[nodiscard]] Round collect();
    /// SIGKILL, and the wait for its end: nothing else can be asked of it afterwards.
    void kill();

private:
    void read(void* to, std::size_t size) const;
    [[nodiscard]] std::string status() const;  ///< how it ended, as the end of a sentence
    std::string name_;
    pid_t pid_ = -1;
    UniqueFd pidfd_;
    UniqueFd to_;
    UniqueFd from_;
};

/// Starts a peer and, once it is ready, has it used. Returns why it takes no part, or not to the
/// end; empty: it did
[[nodiscard]] std::string take_part(std::vector<std::string> argv, const std::function<void(Peer&)>& use,
                                    const std::vector<std::string>& environment = {});

/// Of all threads of a process so far, whoever's child it is.
[[nodiscard]] double processor_us(pid_t pid);

}  // namespace bulkhead::bench
