#pragma once

#include <sys/types.h>

#include <array>
#include <mutex>
#include <thread>

#include "ipc/unique_fd.h"

namespace bulkhead::test {

/// Kills a daemon's supervisor at the n-th thing it does that anybody else could see.
///
/// What a supervisor does reaches others by sendmsg(): to the keeper, to workers, to clients. A seccomp filter stops
/// each of these calls and asks the test (SECCOMP_RET_USER_NOTIF), which lets it through, or ends the supervisor in the
/// middle of it: the packet has not left, and everything before it has. As each change of state is written to the
/// keeper's ledger before anything follows from it, no transition is missed. Nothing in the daemon knows of it.
/// Owns    the filter's listener and a thread that answers; made before the daemon, and gone after it
class StepKiller {
public:
    StepKiller();
    ~StepKiller();
    StepKiller(const StepKiller&) = delete;
    StepKiller& operator=(const StepKiller&) = delete;

    /// In the keeper's process, before its exec: `SpawnOptions::in_child`.
    void install_in_child();
    /// Where filters of this kind are permitted; known once the daemon runs.
    [[nodiscard]] bool works();

    /// The supervisor that runs, or the next one if that is `but_not`, is killed at its `step`-th packet from now on.
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
