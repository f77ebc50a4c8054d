#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "supervisor/keeper/state/saved_state.h"
#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

namespace fs = std::filesystem;
using keeper_link::Exited;
using keeper_link::Type;
using keeper_link::WorkerFate;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;
using UpgradedKeeperDeath = Seated;

Seat upgrade(KeeperProcess& keeper, Seat seat) {
    seat.say(Type::upgrade);
    seat.end_with(0);
    return keeper.next_seat();
}

bool was_re_executed(const KeeperProcess& keeper) {
    return keeper.errors().find("INFO keeper pid=" + std::to_string(keeper.pid()) + " re-executed") !=
           std::string::npos;
}

using Upgrade = Seated;

TEST_F(Upgrade, KeepsPidWorkersLinksLogsAndLedgers) {
    const WorkerSeen threaded = seat.spawn_fake(1);
    EXPECT_EQ(threaded.ask("threads"), "started");
    const WorkerSeen headless = seat.spawn_fake(2);
    EXPECT_EQ(headless.ask("leave"), "left");
    const UniqueFd outsider = threaded.child("setsid");
    const WorkerSeen dead = seat.spawn_fake(3);
    dead.tell("exit 42");
    (void)seat.hear<Exited>(Type::exited);
    const std::string blob(keeper_link::ledger_bytes_max, 'L');
    seat.say(Type::ledger, threaded.key, blob);
    seat.say(Type::ledger, dead.key, "late words");
    seat.settle(4);
    const auto descriptors = descriptor_count(keeper.pid());
    const std::string blocked = status_of(keeper.pid(), "SigBlk");
    threaded.tell("print while no supervisor runs");

    Seat next = upgrade(keeper, std::move(seat));
    const HandOver all = next.take_over();

    EXPECT_TRUE(was_re_executed(keeper)) << keeper.errors();
    EXPECT_THAT(keeper.errors(), Not(HasSubstr("WARN")));
    EXPECT_EQ(all.hello.keeper_pid, keeper.pid());
    EXPECT_EQ(all.hello.supervisor_starts, 2U);
    EXPECT_EQ(all.hello.executions, 1U);
    EXPECT_EQ(all.hello.upgrade_failed, 0U);
    EXPECT_EQ(all.hello.generation_last, 4U);
    ASSERT_EQ(all.workers.size(), 3U);
    EXPECT_EQ(all.workers[0].worker.pid, threaded.pid);
    EXPECT_EQ(all.workers[0].ledger, blob);
    EXPECT_EQ(all.workers[0].worker.ask("echo still here"), "still here");
    char text[64] = {};
    EXPECT_GT(::read(all.workers[0].worker.log.get(), text, sizeof text - 1), 0);
    EXPECT_STREQ(text, "while no supervisor runs");
    EXPECT_EQ(all.workers[1].worker.ask("echo me, too"), "me, too");
    EXPECT_EQ(all.workers[2].record.fate, static_cast<std::uint32_t>(WorkerFate::exited));
    EXPECT_EQ(all.workers[2].record.exit_number, 42);
    EXPECT_EQ(all.workers[2].ledger, "late words");
    EXPECT_TRUE(is_alive(outsider));
    EXPECT_EQ(status_of(keeper.pid(), "SigBlk"), blocked);
    next.settle(5);
    EXPECT_EQ(descriptor_count(keeper.pid()), descriptors);
}

TEST_F(Upgrade, LeavesAKeeperThatSpawnsSignalsAndReapsAsBefore) {
    const WorkerSeen old = seat.spawn_fake(1);
    Seat next = upgrade(keeper, std::move(seat));
    next.take_over();

    const WorkerSeen young = next.spawn_fake(2);
    EXPECT_THAT(descriptors_of(young.pid), ElementsAre(Pair(0, "/dev/null"), Pair(1, StartsWith("pipe:")),
                                                       Pair(2, StartsWith("pipe:")), Pair(3, StartsWith("socket:"))));
    EXPECT_EQ(status_of(young.pid, "SigBlk"), "0000000000000000");
    for (const WorkerSeen* worker : {&old, &young}) {
        next.say(Type::signal, keeper_link::Signal{worker->key, SIGTERM, 1});
        const auto exited = next.hear<Exited>(Type::exited);
        EXPECT_EQ(exited.key, worker->key);
        EXPECT_EQ(exited.exit_number, SIGTERM);
        EXPECT_EQ(exited.group_empty, 1U);
        next.say(Type::forget, worker->key);
    }
    next.ask_spawn(key_of("m", 2), {FAKE_WORKER});  // a generation that the former program has seen
    EXPECT_TRUE(ends(next.process()));
    Seat last = keeper.next_seat();
    EXPECT_EQ(last.take_over().workers.size(), 0U);
    keeper.signal(SIGTERM);
    EXPECT_TRUE(last.hear().is(Type::stop_asked));
    last.say(Type::stop);
    last.end_with(0);
    EXPECT_EQ(keeper.wait(), 0);
    EXPECT_FALSE(fs::exists(keeper.socket()));
}

TEST_F(Upgrade, ManyTimesLeavesNothingBehind) {
    const WorkerSeen worker = seat.spawn_fake(1);
    seat.settle(2);
    const auto descriptors = descriptor_count(keeper.pid());
    const auto words = words_of(keeper.pid(), "cmdline").size();

    for (std::uint64_t i = 0; i < 20; ++i) {
        seat = upgrade(keeper, std::move(seat));
        EXPECT_EQ(seat.take_over().hello.supervisor_starts, i + 2);
        EXPECT_EQ(worker.ask("echo alive"), "alive");
    }

    seat.settle(3);
    EXPECT_EQ(descriptor_count(keeper.pid()), descriptors);
    EXPECT_EQ(words_of(keeper.pid(), "cmdline").size(), words + 2) << "--resume and its number, once";
    EXPECT_EQ(children_of(keeper.pid()), (std::set<pid_t>{worker.pid, seat.pid()}));
    EXPECT_EQ(status_of(keeper.pid(), "Threads"), "1");
#ifndef __SANITIZE_ADDRESS__  // which has memory of its own in it
    EXPECT_LE(std::stol(status_of(keeper.pid(), "VmRSS")), 2048);
#endif
}

TEST_F(Upgrade, LosesNoEndAndNoSignalThatCameMeanwhile) {
    const WorkerSeen first = seat.spawn_fake(1);
    const WorkerSeen second = seat.spawn_fake(2);
    seat.settle(3);

    keeper.signal(SIGSTOP);
    seat.say(Type::upgrade);
    first.tell("exit 7");
    second.tell("abort");
    EXPECT_TRUE(ends(first.pidfd));
    EXPECT_TRUE(ends(second.pidfd));
    seat.end_with(0);
    EXPECT_TRUE(ends(seat.process()));
    keeper.signal(SIGHUP);
    keeper.signal(SIGCONT);
    seat = keeper.next_seat();
    const HandOver all = seat.take_over();

    ASSERT_EQ(all.workers.size(), 2U);
    std::map<std::uint64_t, int> ended;
    bool reload_asked = false;
    for (const RecordSeen& seen : all.workers)
        if (seen.record.fate != 0) ended[seen.record.key.generation] = seen.record.exit_number;
    while (ended.size() < 2 || !reload_asked) {
        const Heard heard = seat.hear();
        if (heard.is(Type::exited)) ended[heard.as<Exited>().key.generation] = heard.as<Exited>().exit_number;
        reload_asked = reload_asked || heard.is(Type::reload_asked);
    }
    EXPECT_THAT(ended, ElementsAre(Pair(1, 7), Pair(2, SIGABRT)));
    EXPECT_TRUE(was_re_executed(keeper)) << keeper.errors();
}

TEST_F(Upgrade, KeepsTheSocketAndTheLockOfItsFolder) {
    seat = upgrade(keeper, std::move(seat));
    seat.take_over();

    const Ended second = run_keeper({"--socket", keeper.socket(), "--supervisor", "/nonexistent", "fleet"});
    EXPECT_THAT(second.errors, HasSubstr("already_running"));
    const UniqueFd client = unix_client(keeper.socket());
    ASSERT_TRUE(client);
    EXPECT_TRUE(readable(seat.listening().get()));
}

TEST_F(UpgradedKeeperDeath, TakesEveryWorkerAndTheSupervisorAlong) {
    const WorkerSeen plain = seat.spawn_fake(1);
    const WorkerSeen threaded = seat.spawn_fake(2);
    EXPECT_EQ(threaded.ask("threads"), "started");
    const WorkerSeen headless = seat.spawn_fake(3);
    EXPECT_EQ(headless.ask("leave"), "left");
    Seat next = upgrade(keeper, std::move(seat));
    next.take_over();
    const WorkerSeen young = next.spawn_fake(4);

    keeper.signal(SIGKILL);

    for (const WorkerSeen* worker : {&plain, &threaded, &headless, &young}) EXPECT_TRUE(ends(worker->pidfd));
    EXPECT_TRUE(ends(next.process()));
    EXPECT_EQ(keeper.wait(), 128 + SIGKILL);
}

/// A keeper whose program lies where the test can replace it.
struct Release : ::testing::Test {
    const Folder bin;
    const fs::path program = bin / "bulkheadd";
    std::optional<KeeperProcess> keeper;
    std::optional<Seat> seat;
    std::optional<WorkerSeen> worker;

    void SetUp() override {
        fs::copy_file(BULKHEADD, program);
        keeper.emplace(KeeperOptions{.command = {program}});
        seat.emplace(keeper->next_seat());
        seat->take_over();
        worker.emplace(seat->spawn_fake(1));
    }

    /// As an installer does: a new file takes the name.
    void replace_by_script(const std::string& body) {
        std::ofstream{bin / "new"} << "#!/bin/sh\n" << body << "\n";
        fs::permissions(bin / "new", fs::perms::owner_all);
        fs::rename(bin / "new", program);
    }

    void expect_that_the_old_one_goes_on(const std::string& why) {
        const auto descriptors = descriptor_count(keeper->pid());
        Seat next = upgrade(*keeper, std::move(*seat));
        const HandOver all = next.take_over();
        EXPECT_EQ(all.workers.size(), 1U);
        EXPECT_EQ(all.hello.executions, 0U);
        EXPECT_NE(all.hello.upgrade_failed, 0U);
        EXPECT_FALSE(was_re_executed(*keeper));
        EXPECT_THAT(keeper->errors(), HasSubstr(why));
        EXPECT_THAT(keeper->errors(), HasSubstr("the old program goes on, with every worker"));
        EXPECT_EQ(worker->ask("echo alive"), "alive");
        EXPECT_EQ(descriptor_count(keeper->pid()), descriptors);
        const WorkerSeen young = next.spawn_fake(2);
        EXPECT_EQ(descriptors_of(young.pid).size(), 4U) << "close-on-exec is as before";
        EXPECT_EQ(children_of(keeper->pid()), (std::set<pid_t>{worker->pid, young.pid, next.pid()}));
    }
};

TEST_F(Release, ThatReplacedTheFileIsWhatRunsAfterwards) {
    struct stat before {};
    struct stat after {};
    ::stat(program.c_str(), &before);
    fs::copy_file(BULKHEADD, bin / "new");
    fs::rename(bin / "new", program);
    ::stat(program.c_str(), &after);
    ASSERT_NE(before.st_ino, after.st_ino);
    const std::string exe = "/proc/" + std::to_string(keeper->pid()) + "/exe";
    EXPECT_THAT(fs::read_symlink(exe).string(), ::testing::EndsWith(" (deleted)"));

    Seat next = upgrade(*keeper, std::move(*seat));
    EXPECT_EQ(next.take_over().workers.size(), 1U);

    struct stat running {};
    ASSERT_EQ(::stat(exe.c_str(), &running), 0);
    EXPECT_EQ(running.st_ino, after.st_ino);
    EXPECT_EQ(worker->ask("echo alive"), "alive");
    EXPECT_THAT(keeper->errors(), Not(HasSubstr("WARN")));
}

TEST_F(Release, ThatAnotherSymlinkLeadsToIsWhatRunsAfterwards) {
    fs::create_directory(bin / "two");
    fs::copy_file(BULKHEADD, bin / "two/bulkheadd");
    fs::create_symlink(program, bin / "current");
    KeeperProcess linked{{.command = {bin / "current"}}};
    Seat first = linked.next_seat();
    first.take_over();
    fs::create_symlink(bin / "two/bulkheadd", bin / "next");
    fs::rename(bin / "next", bin / "current");

    Seat next = upgrade(linked, std::move(first));
    next.take_over();

    EXPECT_EQ(fs::read_symlink("/proc/" + std::to_string(linked.pid()) + "/exe"), bin / "two/bulkheadd");
}

TEST_F(Release, ThatIsGoneChangesNothing) {
    fs::remove(program);
    expect_that_the_old_one_goes_on("No such file or directory");
}

/// What it is asked is a state, a file descriptor and the whole command line.
TEST_F(Release, ThatRefusesTheStateChangesNothing) {
    replace_by_script("echo \"asked: $*\" >&2; test -s /proc/self/fd/3 || exit 9; exit 1");
    expect_that_the_old_one_goes_on("does not take this keeper's state (exit status 1)");
    EXPECT_THAT(keeper->errors(), HasSubstr("asked: --check-state 3 --socket " + keeper->socket().string()));
}

TEST_F(Release, ThatCrashesAtOnceChangesNothing) {
    replace_by_script("kill -SEGV $$");
    expect_that_the_old_one_goes_on("does not take this keeper's state (signal 11)");
}

TEST_F(Release, ThatDoesNotAnswerChangesNothing) {
    replace_by_script("sleep 1000");
    expect_that_the_old_one_goes_on("does not take this keeper's state (no answer");
}

/// It says that it understands, and cannot be executed a moment later.
TEST_F(Release, ThatFailsToBeExecutedChangesNothing) {
    replace_by_script("[ \"$1\" = --check-state ] || exit 1; rm \"$0\"");
    expect_that_the_old_one_goes_on("executing " + program.string() + ": No such file or directory");
}

struct Rubbish {
    const char* name;
    int (*make)();
    const char* why = "reading the state of the keeper before this one: ";
};

/// Sound in itself, and without workers.
int sound_state(pid_t pid, int directory_fd, int listening_fd) {
    keeper::SavedKeeper saved{};
    saved.pid = pid;
    saved.directory_fd = directory_fd;
    saved.listening_fd = listening_fd;
    saved.supervisor_starts = 1;
    return keeper::write_state(saved, "/tmp/control.sock", *std::make_unique<keeper::WorkerTable>()).release();
}

class ResumedFrom : public ::testing::TestWithParam<Rubbish> {};

/// Workers that nobody could end would run for ever: so everything goes.
TEST_P(ResumedFrom, EndsEverythingAndSaysWhy) {
    std::array<int, 2> told{};
    std::array<int, 2> held{};
    ASSERT_EQ(::pipe2(told.data(), O_CLOEXEC), 0);
    ASSERT_EQ(::pipe2(held.data(), O_CLOEXEC), 0);
    KeeperProcess keeper{{.arguments = {"--resume", "20", "--supervisor", "/nonexistent", "fleet"}, .in_child = [&] {
                              sigset_t sigchld;
                              ::sigemptyset(&sigchld);
                              ::sigaddset(&sigchld, SIGCHLD);
                              ::sigprocmask(SIG_BLOCK, &sigchld, nullptr);
                              const pid_t child = ::fork();
                              if (child == 0) {
                                  for (;;) ::pause();
                              }
                              (void)!::write(told[1], &child, sizeof child);
                              char word = 0;
                              (void)!::read(held[0], &word, 1);  // until the test holds that child
                              ::dup2(GetParam().make(), 20);
                          }}};
    pid_t child = -1;
    ASSERT_EQ(::read(told[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
    const UniqueFd worker = hold(child);
    ASSERT_EQ(::write(held[1], "x", 1), 1);

    EXPECT_EQ(keeper.wait(), 1);
    EXPECT_THAT(keeper.errors(), StartsWith(std::string{"error: protocol_violation: "} + GetParam().why));
    EXPECT_FALSE(is_alive(worker));
    for (const int end : {told[0], told[1], held[0], held[1]}) ::close(end);
}

const Rubbish rubbish[] = {
    {"AnUnsealedMemfd", [] { return ::memfd_create("state", MFD_ALLOW_SEALING); }},
    {"AnotherFile",
     [] {
         const int memfd = ::memfd_create("state", MFD_ALLOW_SEALING);
         (void)!::write(memfd, std::string(4096, 'x').data(), 4096);
         ::fcntl(memfd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
         return memfd;
     }},
    {"AnotherProcessesState", [] { return sound_state(1, 30, 31); }, "taking over: the state is another process's"},
    {"AStateWhoseDescriptorsAreClosed", [] { return sound_state(::getpid(), 30, 31); },
     "taking over /tmp/control.sock from the keeper before this one: its descriptors lead elsewhere"},
    {"AStateWhoseSocketDoesNotListen",
     [] {
         ::dup2(::open("/tmp", O_RDONLY | O_DIRECTORY), 30);
         ::dup2(::socket(AF_UNIX, SOCK_STREAM, 0), 31);
         return sound_state(::getpid(), 30, 31);
     },
     "taking over /tmp/control.sock from the keeper before this one: its descriptors lead elsewhere"},
};

INSTANTIATE_TEST_SUITE_P(By, ResumedFrom, ::testing::ValuesIn(rubbish),
                         [](const auto& case_) { return std::string{case_.param.name}; });

}  // namespace
}  // namespace bulkhead::test
