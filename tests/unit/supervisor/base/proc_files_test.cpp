#include "supervisor/base/proc_files.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "ipc/base/pidfd.h"
#include "ipc/slab/host_slab.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/replica/worker_environment.h"
#include "tests/unit/supervisor/marked_process.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;

TEST(HostBytes, AreAnonymousAndSharedMemoryNotPageCache) {
    constexpr std::string_view status = "Name:\tworker\nVmRSS:\t   90000 kB\nRssAnon:\t    3000 kB\n"
                                        "RssFile:\t   80000 kB\nRssShmem:\t    7000 kB\nThreads:\t4\n";
    EXPECT_EQ(parse_resident_bytes(status), 10'000U * 1'024);
    EXPECT_EQ(parse_resident_bytes(""), std::nullopt);
    EXPECT_EQ(parse_resident_bytes("RssAnon: 5 kB\n"), std::nullopt);
    EXPECT_EQ(parse_resident_bytes("RssAnon: x kB\nRssShmem:\n"), std::nullopt);
}

/// An engine that forks: what its children take is its own, and what they share with
/// it counts once.
TEST(HostBytes, OfAProcessContainThoseOfItsDescendants) {
    constexpr std::size_t own = 64 << 20;
    std::array<int, 2> grown{};
    ASSERT_EQ(::pipe(grown.data()), 0);
    std::vector<char> shared(own, 'x');
    const auto before = read_host_memory(::getpid());
    const pid_t child = ::fork();
    if (child == 0) {
        if (::fork() == 0) {  // and its child
            std::vector<char> memory(own, 'y');
            (void)!::write(grown[1], memory.data(), 1);
            ::pause();
        }
        std::vector<char> memory(own, 'y');
        (void)!::write(grown[1], memory.data(), 1);
        ::pause();
    }
    std::array<char, 2> said{};
    for (char& one : said) ASSERT_EQ(::read(grown[0], &one, 1), 1);
    const auto descendants = descendants_of(::getpid());
    const auto after = read_host_memory(::getpid());
    for (const pid_t one : descendants) ::kill(one, SIGKILL);
    ::waitpid(child, nullptr, 0);
    EXPECT_EQ(descendants.size(), 2U);
    EXPECT_EQ(read_host_memory(5'000'000), std::nullopt);
    ASSERT_TRUE(before && after) << shared.size();
    EXPECT_GE(before->bytes, own);
    EXPECT_GT(before->mapped, 0U);
    EXPECT_GE(after->bytes, before->bytes + 2 * own - (1 << 20));
#ifndef __SANITIZE_THREAD__  // whose own memory grows with what is written
    EXPECT_LT(after->bytes, before->bytes + 2 * own + own / 2) << "the forked pages are counted once";
#endif
}

TEST(MappedMemfdBytes, CountsOneOwnersSlabsAlone) {
    constexpr std::string_view maps =
        "7f00000000-7f00001000 rw-s 00000000 00:01 11  /memfd:bulkhead:t:m/0#1:1:1 (deleted)\n"
        "7f00002000-7f00004000 r--s 00000000 00:01 12  /memfd:bulkhead:t:m/0#1:1:2 (deleted)\n"
        "7f00005000-7f00006000 r--s 00000000 00:01 13  /memfd:bulkhead:t:m/0#10:1:1 (deleted)\n"
        "7f00007000-7f00008000 r-xp 00000000 00:01 14  /usr/lib/memfd:bulkhead:t:m/0#1:\n"
        "7f00009000-7f0000a000 rw-p 00000000 00:00 0\n"
        "garbage /memfd:bulkhead:t:m/0#1:9";
    EXPECT_EQ(mapped_memfd_bytes(maps, "bulkhead:t:m/0#1:"), 0x3000U);
    EXPECT_EQ(mapped_memfd_bytes("", "bulkhead:"), 0U);
}

TEST(EnvironmentValue, FindsWholeNames) {
    using namespace std::string_view_literals;
    constexpr auto environment = "A=1\0BULKHEAD_WORKER_X=no\0BULKHEAD_WORKER=t:m/0#1\0EMPTY=\0"sv;
    EXPECT_EQ(environment_value(environment, "BULKHEAD_WORKER"), "t:m/0#1");
    EXPECT_EQ(environment_value(environment, "A"), "1");
    EXPECT_EQ(environment_value(environment, "EMPTY"), "");
    EXPECT_EQ(environment_value(environment, "BULKHEAD"), std::nullopt);
    EXPECT_EQ(environment_value("", "A"), std::nullopt);
}

Trace trace_of(const std::string& token, pid_t pid) {
    Trace trace;
    trace.worker = {"m", 0, 7};
    trace.pid = pid;
    trace.group_empty = true;
    trace.marker = token + ":m/0#7";
    trace.slab_prefix = slab_owner_prefix(token, "m", 0, 7);
    return trace;
}

TEST(Remains, NameAProcessThatStillMapsASlab) {
    Gpus gpus;
    const std::string token = fmt::format("slabtest{}", ::getpid());
    const Trace trace = trace_of(token, 5'000'000);
    EXPECT_TRUE(look_for_remains(trace, gpus).nothing_held());
    {
        const auto slab = HostSlab::create(1 << 20, wire::SlabDirection::output, trace.slab_prefix + "1:1");
        ASSERT_TRUE(slab) << slab.error().text();
        const Remains remains = look_for_remains(trace, gpus);
        ASSERT_EQ(remains.held_by.size(), 1U);
        EXPECT_EQ(remains.held_by[0].pid, ::getpid());
        EXPECT_EQ(remains.held_by[0].what, "slab");
        EXPECT_EQ(remains.held_by[0].bytes, 1U << 20);
        EXPECT_EQ(remains.held_by[0].name, process_name(::getpid()));
    }
    EXPECT_TRUE(look_for_remains(trace, gpus).nothing_held());
}

TEST(Remains, EndProcessesThatLeftTheirGroupButCarryTheMarker) {
    Gpus gpus;
    const std::string token = fmt::format("escapetest{}", ::getpid());
    const Trace trace = trace_of(token, 5'000'000);
    test::MarkedProcess escaped{{"BULKHEAD_WORKER=" + trace.marker}};
    test::LeaderlessProcess leaderless{{"BULKHEAD_WORKER=" + trace.marker}};
    test::MarkedProcess neighbour{{"BULKHEAD_WORKER=" + token + ":m/0#70"}};

    const Remains remains = look_for_remains(trace, gpus);

    std::vector<pid_t> killed;
    for (const Holder& holder : remains.held_by) {
        killed.push_back(holder.pid);
        EXPECT_EQ(holder.what, "process");
        EXPECT_GT(holder.bytes, 0U);
    }
    ASSERT_THAT(killed, testing::UnorderedElementsAre(escaped.pid(), leaderless.pid()));
    EXPECT_EQ(escaped.wait(), SIGKILL);
    EXPECT_EQ(leaderless.wait(), SIGKILL);
    EXPECT_TRUE(neighbour.is_running());
    EXPECT_TRUE(look_for_remains(trace, gpus).nothing_held());
}

TEST(Remains, AGroupThatIsNotEmptyIsSeen) {
    Gpus gpus;
    test::MarkedProcess member{{}};
    Trace trace = trace_of("grouptest", member.pid());
    trace.group_empty = false;
    EXPECT_FALSE(look_for_remains(trace, gpus).group_empty);
    member.kill();
    member.wait();
    EXPECT_TRUE(look_for_remains(trace, gpus).group_empty);
}

TEST(KillProcessIf, NeverHitsAStrangerThatGotTheNumber) {
    // The one that was meant ends, and a stranger gets its number, after it was chosen and before
    // it is signalled: as close to that as a test can come, the number is the stranger's when the
    // question is asked.
    test::MarkedProcess stranger{{"BULKHEAD_WORKER=other"}};
    std::vector<pid_t> asked;
    const UniqueFd pidfd = kill_process_if(stranger.pid(), [&](pid_t pid) {
        asked.push_back(pid);
        const auto environment = read_proc_file(pid, "environ", 4096);
        return environment && environment_value(*environment, "BULKHEAD_WORKER") == "meant";
    });
    EXPECT_FALSE(pidfd);
    EXPECT_THAT(asked, testing::ElementsAre(stranger.pid()));
    EXPECT_TRUE(stranger.is_running());
}

TEST(KillProcessIf, EndsTheOneThatIsMeantAndNoOtherOnceThatHasEnded) {
    test::MarkedProcess known{{}};
    const UniqueFd pidfd = kill_process_if(known.pid(), [](pid_t) { return true; });
    ASSERT_TRUE(pidfd);
    EXPECT_TRUE(ends_within(pidfd, 20s));
    EXPECT_EQ(known.wait(), SIGKILL);

    // The pidfd was opened before the question: the number is free for others now, the signal
    // is not theirs.
    test::MarkedProcess meant{{}};
    EXPECT_FALSE(kill_process_if(meant.pid(), [&](pid_t) {
        meant.kill();
        meant.wait();
        return true;
    }));
    EXPECT_FALSE(kill_process_if(5'000'000, [](pid_t) { return true; }));
}

TEST(WorkerLaunch, TheDaemonsOwnVariablesWinOverDeclaredAndInheritedOnes) {
    const WorkerLaunch launch{"/bin/w", "tok", "/run/s", "/cache", {{"PATH", "/bin"}, {"HOME", "/h"}}};
    const auto environment = launch.environment({"m", 1, 9}, "GPU-7",
                                                {{"HOME", "/declared"}, {"CUDA_VISIBLE_DEVICES", "all"}, {"X", "a=b"}});
    EXPECT_THAT(environment,
                testing::UnorderedElementsAre("OMP_WAIT_POLICY=passive", "PATH=/bin", "HOME=/declared", "X=a=b",
                                              "CUDA_VISIBLE_DEVICES=GPU-7", "BULKHEAD_WORKER=tok:m/1#9",
                                              "BULKHEAD_SOCKET=/run/s", "BULKHEAD_CACHE=/cache"));
}

TEST(WorkerLaunch, ThreadsOfAModelThatComputesInStepsLookForWorkWhereThereIsMoreThanOneCore) {
    const auto looks = [](int cores, const config::ModelSpec& spec) {
        WorkerLaunch launch{"/bin/cat", "tok", "/run/s", "/cache", {}, "/bin/cat"};
        launch.cores = cores;
        std::vector<std::string> found = launch.request({"m", 0, 1}, spec, "").value().environment;
        std::erase_if(found, [](const std::string& entry) { return !entry.starts_with("GOMP_SPINCOUNT="); });
        return found;
    };
    EXPECT_THAT(looks(8, {}), testing::IsEmpty()) << "it computes in one step";
    for (const auto& [runtime, count] :
         {std::pair{config::Runtime::generate, "20000"}, {config::Runtime::python, "2000"}}) {
        const auto expected = std::string{"GOMP_SPINCOUNT="} + count;
        config::ModelSpec spec;
        spec.runtime = runtime;
        spec.python.interpreter = "/bin/cat";
        EXPECT_THAT(looks(1, spec), testing::IsEmpty());
        EXPECT_THAT(looks(2, spec), testing::ElementsAre(expected));
        EXPECT_THAT(looks(8, spec), testing::ElementsAre(expected));
        spec.environment = {{"GOMP_SPINCOUNT", "7"}};
        EXPECT_THAT(looks(8, spec), testing::ElementsAre("GOMP_SPINCOUNT=7"));
        spec.environment = {{"OMP_WAIT_POLICY", "passive"}};
        EXPECT_THAT(looks(8, spec), testing::IsEmpty());
    }
}

TEST(WorkerLaunch, AnEngineInPythonIsRunByItsInterpreterAndElseByPython3OnPath) {
    const std::filesystem::path start = BULKHEAD_SOURCE_DIR "/clients/python/bulkhead/worker/start.py";
    WorkerLaunch launch{"/bin/cat", "tok", "/run/s", "/cache", {{"PATH", "/nowhere:/usr/bin:/bin"}}, start};
    config::ModelSpec spec;
    EXPECT_THAT(launch.command(spec).value(), testing::ElementsAre("/bin/cat"));
    launch.program = "/bin/no-worker";
    EXPECT_THAT(launch.command(spec).error().attempt, testing::HasSubstr("there is no /bin/no-worker"));
    spec.runtime = config::Runtime::python;
    spec.python = {"m:Engine", "/bin/sh", {}};
    EXPECT_THAT(launch.command(spec).value(), testing::ElementsAre("/bin/sh", "-u", start.string()));
    spec.python.interpreter = "/etc/passwd";
    EXPECT_THAT(launch.command(spec).error().attempt, testing::HasSubstr("/etc/passwd cannot be executed"));
    spec.python.interpreter.clear();
    spec.environment["PATH"] = "/nowhere";
    EXPECT_THAT(launch.command(spec).error().attempt, testing::HasSubstr("no python3 in /nowhere"));
    launch.python_start = "/nowhere/start.py";
    EXPECT_EQ(launch.command(spec).error().code, ErrorCode::config_invalid);
}

TEST(WorkerLaunch, SecretsOfTheDaemonAreNotInherited) {
    const char* const environment[] = {
        "PATH=/bin", "AWS_SECRET_ACCESS_KEY=x", "LC_ALL=C", "BULKHEAD_SOCKET=/s", "PATHOLOGY=1", "odd", nullptr};
    EXPECT_THAT(inheritable(environment),
                testing::ElementsAre(testing::Pair("LC_ALL", "C"), testing::Pair("PATH", "/bin")));
}

TEST(DaemonToken, IsTheSameForEverySupervisorOfAKeeperAndAnotherForEachKeeper) {
    EXPECT_EQ(daemon_token(12, 1'700'000'000'000), daemon_token(12, 1'700'000'000'000));
    EXPECT_NE(daemon_token(12, 1'700'000'000'000), daemon_token(13, 1'700'000'000'000));
    EXPECT_NE(daemon_token(12, 1'700'000'000'000), daemon_token(12, 1'700'000'000'001));
    EXPECT_EQ(daemon_token(12, 1'700'000'000'000).find(':'), std::string::npos);
}

}  // namespace
}  // namespace bulkhead::supervisor
