// What one request costs once everything is warm: a wake-up of the worker and one of the client. A
// worker and a client of the real thing, with switches and page faults as the kernel counts them,
// and system calls by strace.
//
// Switches and faults are counted in rounds, and the best round is looked at: whatever is done once
// in a round's requests shows in every round, while a worker that says on its link that it is idle,
// or is asked for its statistics, shows in few.

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/cpus.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/file_text.h"
#include "worker/loop/limits.h"

namespace bulkhead::test {
namespace {

constexpr int warm_up = 200;
constexpr int rounds = 20;
constexpr int round_requests = 1000;
enum class Over { socket, rings };

/// System calls for each request, every one of which ends a sleep or begins one: the worker sleeps,
/// and wakes the client. Its event loop begins each wait with a call more. On the socket each
/// packet is also a call, and so is the look that finds no more of them: the release of the last
/// result goes in the packet of the request. In rings packets are none, but the worker looks at the
/// rings' epoll descriptor once it is awake.
constexpr std::uint64_t worker_calls_max_on_socket = 5, worker_calls_max_on_rings = 4;
constexpr std::uint64_t client_calls_max_on_socket = 3, client_calls_max_on_rings = 2;

std::uint64_t worker_calls_max(Over over) {
    return over == Over::socket ? worker_calls_max_on_socket : worker_calls_max_on_rings;
}

std::uint64_t client_calls_max(Over over) {
    return over == Over::socket ? client_calls_max_on_socket : client_calls_max_on_rings;
}

SpawnOptions minimal() {
    SpawnOptions options;
    options.programs = minimal_programs();
    return options;
}

/// Faults of a process without disk access, as `/proc/PID/stat` has them in its tenth field.
std::uint64_t faults_of(pid_t pid) {
    std::array<char, 64> path{};
    *fmt::format_to(path.data(), "/proc/{}/stat", pid) = '\0';
    std::array<char, 1024> text{};
    const int fd = ::open(path.data(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::read(fd, text.data(), text.size() - 1) <= 0) ADD_FAILURE() << "no " << path.data();
    ::close(fd);
    const char* field = std::strrchr(text.data(), ')') + 1;  // behind the second
    for (int i = 0; i < 8; ++i) field = std::strchr(field + 1, ' ');
    std::uint64_t faults = 0;
    std::from_chars(field + 1, text.data() + text.size(), faults);
    return faults;
}

/// How often threads of a process left their CPU. On one CPU each message that wakes its reader is
/// one of them: the writer sleeps then, or the reader takes its place before it does.
std::uint64_t switches_of(pid_t pid) {
    constexpr std::string_view key = "voluntary_ctxt_switches:";  // and nonvoluntary_ctxt_switches
    std::uint64_t switches = 0;
    for (const auto& task : std::filesystem::directory_iterator{fmt::format("/proc/{}/task", pid)}) {
        const std::string status = file_text(task.path() / "status");
        for (std::size_t at = status.find(key); at != std::string::npos; at = status.find(key, at + 1))
            switches += std::stoull(status.substr(at + key.size()));
    }
    return switches;
}

/// Of one round, or at one moment.
struct Counts {
    std::uint64_t client, worker;
    friend Counts operator-(const Counts& a, const Counts& b) { return {a.client - b.client, a.worker - b.worker}; }
};

/// Calls by name: the table that `strace -c` writes.
std::map<std::string, std::uint64_t> calls_in(const std::filesystem::path& table) {
    std::map<std::string, std::uint64_t> calls;
    std::ifstream lines{table};
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words{line};
        std::vector<std::string> columns{std::istream_iterator<std::string>{words}, {}};
        if (columns.size() < 5 || columns.back() == "total" || !std::isdigit(columns[3].front())) continue;
        calls[columns.back()] = std::stoull(columns[3]);
    }
    return calls;
}

/// Every thread of it is traced.
bool is_traced(pid_t pid) {
    for (const auto& task : std::filesystem::directory_iterator{fmt::format("/proc/{}/task", pid)}) {
        if (file_text(task.path() / "status").find("TracerPid:\t0\n") != std::string::npos) return false;
    }
    return true;
}

class SteadyState : public testing::TestWithParam<Over> {
protected:
    SteadyState() {
        daemon_.emplace(fleet({minimal_model("echo")}), minimal());
        ControlClient control = daemon_->connect();
        ChannelOptions options;
        options.rings = GetParam() != Over::socket;
        channel_.emplace(Channel::open(control, "echo", options).value());
        worker_ = daemon_->pid("echo");
    }

    /// Allocate, fill, send, read, give back.
    bool request(float value) {
        constexpr std::array<std::int64_t, 2> dims{4, 4};
        Result<Input> x = channel_->allocate(wire::DType::float32, std::span{dims}.first(1));
        if (!x) return false;
        x->as<float>()[0] = value;
        const std::array<NamedInput, 1> inputs{{{"x", &*x}}};
        const Result<Reply> reply = channel_->infer({.inputs = inputs});
        return reply && reply->outputs.size() == 1 && reply->outputs[0].as<float>()[0] == value;
    }
    bool requests(int count) {
        for (int i = 0; i < count; ++i)
            if (!request(static_cast<float>(i))) return false;
        return true;
    }

    [[nodiscard]] Counts faults() const {
        rusage own{};
        ::getrusage(RUSAGE_SELF, &own);
        return {static_cast<std::uint64_t>(own.ru_minflt), faults_of(worker_)};
    }
    [[nodiscard]] Counts switches() const { return {switches_of(::getpid()), switches_of(worker_)}; }

    /// Of each side the best round of requests.
    template <typename Count>
    Counts least(Count counts) {
        EXPECT_TRUE(requests(warm_up));
        Counts least{~0ULL, ~0ULL};
        for (int round = 0; round < rounds; ++round) {
            const Counts before = counts();
            EXPECT_TRUE(requests(round_requests));
            const Counts in_round = counts() - before;
            least = {std::min(least.client, in_round.client), std::min(least.worker, in_round.worker)};
        }
        return least;
    }

    void expect_only_wake_ups(pid_t pid, std::uint64_t calls_per_request_max);

    TemporaryFolder folder_;
    std::optional<Daemon> daemon_;
    std::optional<Channel> channel_;
    pid_t worker_ = 0;
};

TEST_P(SteadyState, ARequestFaultsNothingIn) {
    const Counts faulted = least([this] { return faults(); });

    EXPECT_EQ(faulted.client, 0u);
    EXPECT_EQ(faulted.worker, 0u);
}

TEST_P(SteadyState, ARequestWakesTheWorkerOnceAndTheClientOnce) {
    for (const pid_t process : {::getpid(), worker_}) ASSERT_TRUE(keep_on({::sched_getcpu()}, process));

    const Counts switched = least([this] { return switches(); });

    fmt::print("switches of {} requests: client {}, worker {}\n", round_requests, switched.client, switched.worker);
    // Looks of the worker's cover, questions of the daemon.
    constexpr std::uint64_t others_max = round_requests / 10;
    EXPECT_GE(switched.client, round_requests) << "not all were counted";
    EXPECT_GE(switched.worker, round_requests) << "not all were counted";
    EXPECT_LE(switched.client, round_requests + others_max);
    EXPECT_LE(switched.worker, round_requests + others_max);
}

/// What `strace` counts of one process while requests are served.
void SteadyState::expect_only_wake_ups(pid_t pid, std::uint64_t calls_per_request_max) {
    constexpr int count = 2000;
    if (run({"/bin/sh", "-c", "command -v strace"}).exit_code != 0) GTEST_SKIP() << "strace is not installed";
    ASSERT_TRUE(requests(warm_up));
    const std::filesystem::path table = folder_.path() / "calls", words = folder_.path() / "strace";
    SpawnOptions to_file;
    to_file.output = words;
    Process strace{{"strace", "-c", "-f", "-p", std::to_string(pid), "-o", table.string()}, to_file};
    while (!is_traced(pid)) {
        if (strace.wait(std::chrono::milliseconds{10})) GTEST_SKIP() << "strace: " << file_text(words);
    }

    const auto begun = std::chrono::steady_clock::now();
    ASSERT_TRUE(requests(count));
    const auto took = std::chrono::steady_clock::now() - begun;
    namespace limits = worker::limits;
    // It looks at each of requests that come rarely, as they do where strace has to wait for a CPU.
    const bool often = took < count * limits::cover_after / 2;
    const auto looks_max = took / (often ? limits::cover_looks_every : limits::cover_after) + 1;
    strace.signal(SIGINT);
    ASSERT_TRUE(strace.wait(std::chrono::seconds{30}));

    std::uint64_t others = 0, all = 0, timer = 0;
    std::string shown;
    for (const auto& [name, calls] : calls_in(table)) {
        static const std::set<std::string> of_wake_ups{"epoll_wait", "epoll_ctl", "futex", "write", "restart_syscall"};
        static const std::set<std::string> of_packets{"recvmsg", "sendmsg", "poll", "read"};
        static const std::set<std::string> of_timer{"read", "timerfd_settime"};
        if (pid == worker_ && of_timer.contains(name)) {
            timer += calls;
            continue;
        }
        all += calls;
        const bool on_socket = GetParam() == Over::socket;
        if (!of_wake_ups.contains(name) && !(on_socket && of_packets.contains(name))) others += calls;
        fmt::format_to(std::back_inserter(shown), " {} {:.2f}", name, static_cast<double>(calls) / count);
    }
    fmt::print("calls per request:{}\n", shown);
    EXPECT_GT(all, static_cast<std::uint64_t>(count)) << "nothing was counted";
    fmt::print("calls of the cover's timer: {}, looks: {}\n", timer, looks_max);
    // The cover looks as time passes, however many requests come: the timer is set by either
    // thread, and read.
    EXPECT_LE(timer, 3 * static_cast<std::uint64_t>(looks_max)) << shown;
    EXPECT_LT(others, static_cast<std::uint64_t>(count) / 10) << shown;
    // Half a call more: now and then a lock is held when it is asked for, or a sleep ends
    // before it begins.
    EXPECT_LE(all, static_cast<std::uint64_t>(count) * calls_per_request_max + count / 2) << shown;
}

TEST_P(SteadyState, TheWorkerMakesNoSystemCallsButThoseOfWakeUps) {
    expect_only_wake_ups(worker_, worker_calls_max(GetParam()));
}

TEST_P(SteadyState, TheClientMakesNoSystemCallsButThoseOfWakeUps) {
    expect_only_wake_ups(::getpid(), client_calls_max(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Transport, SteadyState, testing::Values(Over::socket, Over::rings),
                         [](const auto& over) { return over.param == Over::socket ? "Socket" : "Rings"; });

}  // namespace
}  // namespace bulkhead::test
