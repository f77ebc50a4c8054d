#pragma once

#include <sys/syscall.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <thread>

#include "ipc/base/unique_fd.h"

namespace bulkhead::test {

#ifdef SYS_dup2
inline constexpr long system_call_of_dup2 = SYS_dup2;
#else
inline constexpr long system_call_of_dup2 = SYS_dup3;  // newer architectures have no other
#endif

/// Makes a system call of a running keeper, or of a child that it is starting, fail as if the
/// system had no room.
///
/// A seccomp filter stops those calls and asks the test (SECCOMP_RET_USER_NOTIF): nothing in the
/// keeper knows of it.
/// Owns    the filter's listener and a thread that answers; made before the keeper,
///         and gone after it
class FaultInjector {
public:
    enum class Who : std::uint8_t { keeper, child };

    FaultInjector();
    ~FaultInjector();
    FaultInjector(const FaultInjector&) = delete;

    /// In the keeper's process, before its exec. Only system calls named in fault_injector.cpp
    /// can fail later.
    void install_in_child();
    /// Lets the keeper run. Returns  false where filters of this kind are not permitted
    bool attach(pid_t keeper);

    /// The next `times` calls of this number fail.
    void fail(Who who, long system_call, int error_number, int times = 1);
    /// How many of those did not happen.
    int left();

private:
    void answer_all();

    std::array<UniqueFd, 2> told_;  ///< a pipe: the listener's number in the child
    UniqueFd listener_;
    UniqueFd quit_;
    std::thread thread_;
    pid_t keeper_ = -1;

    std::mutex mutex_;  ///< guards the four below
    Who who_ = Who::keeper;
    long system_call_ = -1;
    int error_number_ = 0;
    int times_ = 0;
};

}  // namespace bulkhead::test
