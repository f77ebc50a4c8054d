#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Exited;
using keeper_link::Type;
using ::testing::HasSubstr;

bool pid_namespaces_are_permitted() {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::unshare(CLONE_NEWPID | CLONE_NEWNS) == 0 ? 0 : 1);
    int status = 0;
    ::waitpid(child, &status, 0);
    return status == 0 && ::access("/usr/bin/unshare", X_OK) == 0;
}

/// A keeper that is process 1 of a pid namespace, as in a container. Pids that it tells are the
/// namespace's; those that the test sees are its own.
struct ProcessOne : ::testing::Test {
    std::optional<KeeperProcess> unshare;
    std::optional<Seat> seat;
    pid_t keeper = -1;

    void SetUp() override {
        if (!pid_namespaces_are_permitted()) GTEST_SKIP() << "no pid namespace without CAP_SYS_ADMIN or `unshare`";
        unshare.emplace(KeeperOptions{
            .command = {"/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount-proc", BULKHEADD}});
        seat.emplace(unshare->next_seat());
        keeper = *children_of(unshare->pid()).begin();
    }

    UniqueFd hold_only_new_child(const std::set<pid_t>& before) {
        for (const pid_t child : children_of(keeper))
            if (!before.contains(child)) return hold(child);
        return {};
    }
};

TEST_F(ProcessOne, SpawnsReapsIsUpgradedInPlaceAndEndsInOrderWithEverythingInItsNamespace) {
    EXPECT_EQ(seat->take_over().hello.keeper_pid, 1);
    EXPECT_EQ(status_of(keeper, "NSpid"), std::to_string(keeper) + "\t1");
    const WorkerSeen worker = seat->spawn_fake(1);
    EXPECT_EQ(worker.ask("echo alive"), "alive");
    EXPECT_TRUE(is_alive(worker.pidfd));
    const auto before = children_of(keeper);
    EXPECT_NE(worker.ask("setsid"), "");
    worker.tell("exit 3");
    EXPECT_EQ(seat->hear<Exited>(Type::exited).exit_number, 3);
    const UniqueFd orphan = hold_only_new_child(before);
    ASSERT_TRUE(orphan) << "it is process 1's child now";

    ::syscall(SYS_pidfd_send_signal, orphan.get(), SIGKILL, nullptr, 0);
    EXPECT_TRUE(ends(orphan));
    const WorkerSeen next = seat->spawn_fake(2);  // a turn of the loop for what ended before
    next.tell("exit 0");
    (void)seat->hear<Exited>(Type::exited);
    EXPECT_EQ(children_of(keeper), std::set<pid_t>{seat->pid()});

    const WorkerSeen last = seat->spawn_fake(3);
    seat->say(Type::upgrade);
    seat->end_with(0);
    seat.emplace(unshare->next_seat());
    EXPECT_EQ(seat->take_over().workers.back().worker.ask("echo alive"), "alive");
    EXPECT_THAT(unshare->errors(), HasSubstr("INFO keeper pid=1 re-executed"));
    EXPECT_THAT(unshare->errors(), ::testing::Not(HasSubstr("WARN")));
    EXPECT_EQ(children_of(unshare->pid()), std::set<pid_t>{keeper});

    EXPECT_NE(last.ask("setsid"), "");
    ::kill(keeper, SIGTERM);
    EXPECT_TRUE(seat->hear().is(Type::stop_asked));
    seat->say(Type::stop);
    seat->end_with(0);
    EXPECT_EQ(unshare->wait(), 0);
    EXPECT_FALSE(is_alive(last.pidfd));
}

/// A signal without a handler does not reach process 1, unless it is blocked as the keeper's are.
TEST_F(ProcessOne, IsStoppedBySigtermFromInsideAndOutside) {
    seat->take_over();
    (void)seat->spawn(key_of("docker-stop", 1), {"/bin/sh", "-c", "kill -TERM 1"});
    bool asked = false;
    // And the shell's end.
    for (int i = 0; i < 2; ++i) asked = seat->hear().is(Type::stop_asked) || asked;
    EXPECT_TRUE(asked);

    ::kill(keeper, SIGTERM);

    EXPECT_EQ(unshare->wait(), 1);
    EXPECT_THAT(unshare->errors(), HasSubstr("second signal to stop"));
    EXPECT_FALSE(is_alive(seat->process()));
}

TEST_F(ProcessOne, KilledFromOutsideTakesEverythingAlong) {
    seat->take_over();
    const WorkerSeen worker = seat->spawn_fake(1);
    EXPECT_EQ(worker.ask("threads"), "started");

    ::kill(keeper, SIGKILL);

    EXPECT_TRUE(ends(worker.pidfd));
    EXPECT_TRUE(ends(seat->process()));
    (void)unshare->wait();
}

}  // namespace
}  // namespace bulkhead::test
