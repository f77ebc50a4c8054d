#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::SpawnStep;
using ::testing::ElementsAre;
using ::testing::Pair;
using ::testing::StartsWith;

/// The limit is one on numbers, and there may be gaps among those in use.
void leave_free_descriptors(pid_t pid, std::size_t count) {
    const auto used = descriptors_of(pid);
    int limit = 0;
    for (std::size_t free = 0; free < count || used.contains(limit); ++limit) free += used.contains(limit) ? 0 : 1;
    const rlimit bound{static_cast<rlim_t>(limit), 1024};
    ASSERT_EQ(::prlimit(pid, RLIMIT_NOFILE, &bound, nullptr), 0);
}

using Spawn = Seated;

TEST(SpawnedChild, HasExactlyItsDescriptorsAndNoSignalBlockedOrIgnoredWhateverTheKeeperInherited) {
    SeatedKeeper daemon{{.in_child = [] {
        const int full = ::open("/dev/full", O_RDWR);
        for (int fd = 5; fd < 20; ++fd) ::dup2(full, fd);
        ::signal(SIGHUP, SIG_IGN);
        ::signal(SIGUSR1, SIG_IGN);
        sigset_t all;
        ::sigfillset(&all);
        ::sigprocmask(SIG_SETMASK, &all, nullptr);
    }}};
    auto& [keeper, seat] = daemon;

    const WorkerSeen worker = seat.spawn_fake(1);
    const WorkerSeen second = seat.spawn_fake(2);

    for (const pid_t pid : {worker.pid, second.pid})
        EXPECT_THAT(descriptors_of(pid), ElementsAre(Pair(0, "/dev/null"), Pair(1, StartsWith("pipe:")),
                                                     Pair(2, StartsWith("pipe:")), Pair(3, StartsWith("socket:"))));
    EXPECT_THAT(descriptors_of(seat.pid()),
                ::testing::AllOf(::testing::Contains(Pair(3, StartsWith("socket:"))),
                                 ::testing::Contains(Pair(4, StartsWith("socket:"))), ::testing::SizeIs(6)))
        << "the fake supervisor opens one of its own";
    EXPECT_THAT(descriptors_of(keeper.pid()), ::testing::Not(::testing::Contains(Pair(::testing::_, "/dev/full"))));
    EXPECT_EQ(status_of(worker.pid, "SigBlk"), "0000000000000000");
    EXPECT_EQ(status_of(worker.pid, "SigIgn"), "0000000000000000");
}

TEST(SpawnedChild, HasItsDescriptorsEvenWhenTheKeeperStartsWithNoneOpen) {
    SeatedKeeper daemon{{.in_child = [] { ::close_range(0, ~0U, 0); }}};

    const WorkerSeen worker = daemon.seat.spawn_fake(1);

    EXPECT_EQ(worker.ask("echo hello"), "hello");
    EXPECT_EQ(descriptors_of(worker.pid).size(), 4U);
}

TEST_F(Spawn, IsAsToldAndTheKernelsFirstChoiceInAGroupOfItsOwn) {
    const WorkerSeen worker = seat.spawn(key_of("m", 1), {FAKE_WORKER, "", "two words"}, {"A=1", "B=x=y"});
    EXPECT_EQ(worker.ask("echo started"), "started");

    EXPECT_THAT(words_of(worker.pid, "cmdline"), ElementsAre(FAKE_WORKER, "", "two words"));
    EXPECT_THAT(words_of(worker.pid, "environ"), ElementsAre("A=1", "B=x=y"));
    EXPECT_EQ(::getpgid(worker.pid), worker.pid);
    EXPECT_EQ(children_of(keeper.pid()), (std::set<pid_t>{worker.pid, seat.pid()}));
    const auto oom_score = [](pid_t pid) {
        return std::stoi(file_text("/proc/" + std::to_string(pid) + "/oom_score_adj"));
    };
    EXPECT_GT(oom_score(worker.pid), oom_score(::getpid()));
    EXPECT_GT(oom_score(worker.pid), oom_score(keeper.pid()));
    rlimit core{1, 1};  // it asked for 0
    ASSERT_EQ(::prlimit(worker.pid, RLIMIT_CORE, nullptr, &core), 0);
    EXPECT_EQ(core.rlim_cur, 0U);
    EXPECT_EQ(core.rlim_max, 0U);
}

TEST_F(Spawn, LinkAndLogLeadToTheWorker) {
    const WorkerSeen worker = seat.spawn_fake(1);

    worker.tell("print a last line");
    ASSERT_TRUE(readable(worker.log.get()));
    char text[64] = {};
    EXPECT_GT(::read(worker.log.get(), text, sizeof text - 1), 0);

    EXPECT_STREQ(text, "a last line");
    EXPECT_EQ(worker.ask("echo back"), "back");
    EXPECT_NE(::fcntl(worker.log.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(worker.link.get(), F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(Spawn, OfWhatIsNoProgramNamesTheStepAndLeavesNothing) {
    std::uint64_t generation = 1;
    seat.settle(generation);
    const std::size_t before = descriptor_count(keeper.pid());
    const std::pair<const char*, int> programs[] = {
        {"/nonexistent/program", ENOENT}, {"/etc/passwd", EACCES}, {"/", EACCES}, {"", ENOENT}};
    for (const auto& [program, error] : programs) {
        const WorkerKey key = key_of("m", ++generation);
        const auto failed = seat.spawn_in_vain(key, {program});
        EXPECT_EQ(failed.step, static_cast<std::uint32_t>(SpawnStep::exec));
        EXPECT_EQ(failed.error_number, error) << program;
        EXPECT_EQ(failed.key, key);
    }
    EXPECT_EQ(descriptor_count(keeper.pid()), before);
    EXPECT_EQ(children_of(keeper.pid()), std::set<pid_t>{seat.pid()});
}

TEST_F(Spawn, WithoutDescriptorsLeftNamesTheStepAndLeavesNothing) {
    const WorkerSeen neighbour = seat.spawn_fake(1);
    seat.settle(2);
    const std::size_t used = descriptor_count(keeper.pid());
    std::uint64_t generation = 2;

    // One spawn takes two for the link, two for the log and one for the pidfd.
    const std::pair<std::size_t, SpawnStep> cases[] = {{0, SpawnStep::socket_pair},
                                                       {1, SpawnStep::socket_pair},
                                                       {2, SpawnStep::log_pipe},
                                                       {3, SpawnStep::log_pipe},
                                                       {4, SpawnStep::clone}};
    for (const auto& [spare, step] : cases) {
        leave_free_descriptors(keeper.pid(), spare);

        const auto failed = seat.spawn_in_vain(key_of("m", ++generation), {FAKE_WORKER});

        EXPECT_EQ(failed.step, static_cast<std::uint32_t>(step)) << spare << " to spare";
        EXPECT_EQ(failed.error_number, EMFILE);
        EXPECT_EQ(descriptor_count(keeper.pid()), used);
    }
    EXPECT_EQ(children_of(keeper.pid()), (std::set<pid_t>{neighbour.pid, seat.pid()}));
    EXPECT_EQ(neighbour.ask("echo alive"), "alive");

    leave_free_descriptors(keeper.pid(), 5);
    EXPECT_EQ(seat.spawn_fake(++generation).ask("echo born"), "born");
}

TEST_F(Spawn, IntoWhatIsNoCgroupOrFoundNoDescriptorLeftFailsAlone) {
    seat.settle(1);
    const std::size_t used = descriptor_count(keeper.pid());
    const UniqueFd directory{::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    const auto failure_of = [&](std::uint64_t generation) {
        seat.ask_spawn(key_of("m", generation), {FAKE_WORKER}, {}, directory.get());
        return seat.hear<keeper_link::SpawnFailed>(keeper_link::Type::spawn_failed);
    };

    EXPECT_EQ(failure_of(2).step, static_cast<std::uint32_t>(SpawnStep::clone));
    EXPECT_EQ(descriptor_count(keeper.pid()), used);
    leave_free_descriptors(keeper.pid(), 0);
    EXPECT_EQ(failure_of(3).step, static_cast<std::uint32_t>(SpawnStep::descriptors));
    EXPECT_EQ(descriptor_count(keeper.pid()), used);
}

/// A cgroup of version 2, gone with the test; empty where none may be made.
struct Cgroup {
    std::filesystem::path path;
    explicit Cgroup(const std::string& name) {
        for (const char* root : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
            std::error_code failed;
            if (!std::filesystem::exists(std::filesystem::path{root} / "cgroup.procs")) continue;
            std::filesystem::create_directory(std::filesystem::path{root} / name, failed);
            if (!failed) path = std::filesystem::path{root} / name;
        }
    }
    ~Cgroup() {
        if (!path.empty()) ::rmdir(path.c_str());
    }
};

TEST_F(Spawn, StartsInsideTheCgroupThatCame) {
    const Cgroup cgroup{"bulkhead-test-" + std::to_string(::getpid())};
    if (cgroup.path.empty()) GTEST_SKIP() << "no cgroup v2 that this user may write";
    const UniqueFd directory{::open(cgroup.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};

    const WorkerSeen worker = seat.spawn(key_of("m", 1), {FAKE_WORKER}, {}, directory.get());

    EXPECT_EQ(file_text(cgroup.path / "cgroup.procs"), std::to_string(worker.pid) + "\n");
    worker.tell("exit 0");
    (void)seat.hear<keeper_link::Exited>(keeper_link::Type::exited);
}

TEST_F(Spawn, BeyondTheTableIsRefusedAndTheTableIsHandedOverAndReusedAfterForget) {
    std::vector<WorkerSeen> workers;
    std::uint64_t generation = 0;
    const std::string blob(keeper_link::ledger_bytes_max, 'x');
    for (std::size_t i = 0; i < keeper_link::workers_max; ++i) {
        workers.push_back(seat.spawn(key_of("m", ++generation), {"/bin/sleep", "infinity"}));
        seat.say(keeper_link::Type::ledger, workers.back().key, blob);
    }

    const auto failed = seat.spawn_in_vain(key_of("m", ++generation), {"/bin/sleep", "infinity"});
    EXPECT_EQ(failed.step, static_cast<std::uint32_t>(SpawnStep::table_full));

    seat.kill();
    seat = keeper.next_seat();
    seat.greet();  // before it reads anything: a socket holds less than a full table
    const HandOver all = seat.receive_hand_over();
    ASSERT_EQ(all.workers.size(), keeper_link::workers_max);
    for (const RecordSeen& seen : all.workers) EXPECT_EQ(seen.ledger, blob);

    seat.say(keeper_link::Type::signal, keeper_link::Signal{workers[7].key, SIGKILL, 0});
    EXPECT_EQ(seat.hear<keeper_link::Exited>(keeper_link::Type::exited).key, workers[7].key);
    EXPECT_EQ(seat.spawn_in_vain(key_of("m", ++generation), {FAKE_WORKER}).step,
              static_cast<std::uint32_t>(SpawnStep::table_full))
        << "a dead worker keeps its place until it is forgotten";
    seat.say(keeper_link::Type::forget, workers[7].key);
    EXPECT_GT(seat.spawn_fake(++generation).pid, 0);
}

}  // namespace
}  // namespace bulkhead::test
