#pragma once

#include <sys/types.h>

#include <array>
#include <mutex>
#include <string>
#include <thread>

#include "ipc/base/unique_fd.h"

namespace bulkhead::test {

/// Kills a daemon's supervisor at its n-th sendmsg().
///
/// By sendmsg() go its packets to the keeper, the ledger among them, and to workers, and its
/// answers to clients. A seccomp filter stops each of these calls and asks the test
/// (SECCOMP_RET_USER_NOTIF), which lets it through, or ends the supervisor in the middle of it: the
/// packet has not left, and everything before it has. Nothing in the daemon knows of it.
/// Not seen is what it does between two packets without one: files that it writes or renames, a
/// write to cgroup.kill, a signal that it sends past the keeper, ::send().
/// Owns    the filter's listener and a thread that answers; made before the daemon,
///         and gone after it
class StepKiller {
public:
    StepKiller();
    ~StepKiller();
    StepKiller(const StepKiller&) = delete;
    StepKiller& operator=(const StepKiller&) = delete;

    /// In the keeper's process, before its exec: `SpawnOptions::in_child`.
    void install_in_child();
    /// The listener was taken; known once the daemon runs.
    [[nodiscard]] bool works();
    /// Why none can work here; empty: it can. Tried once, on a child; where one cannot, no daemon
    /// would start with it.
    [[nodiscard]] static const std::string& refusal();

    /// The supervisor that runs, or the next one if that is `but_not`, is killed at its `step`-th
    /// packet from now on.
    void kill_at(int step, pid_t but_not = -1);
    /// The one it has killed since then; -1: none yet.
    [[nodiscard]] pid_t killed();

private:
    void answer_all();
    [[nodiscard]] bool take_listener();
    [[nodiscard]] bool is_due(pid_t pid);

    std::array<UniqueFd, 2> told_;   ///< a pipe: the child's pid and the listener's number in it
    std::array<UniqueFd, 2> taken_;  ///< a pipe: the child may go on
    UniqueFd quit_;
    UniqueFd listener_;

    std::mutex mutex_;  ///< guards the four below
    bool works_ = false;
    int steps_left_ = 0;
    pid_t but_not_ = -1;
    pid_t killed_ = -1;

    std::thread thread_;  ///< last: it uses all of the others
};

}  // namespace bulkhead::test
