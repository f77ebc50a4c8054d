#include "tests/bench/peers/peer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <utility>

extern char** environ;

namespace bulkhead::bench {
namespace {

/// The longest that any of them may be silent: a gigabyte through gRPC takes seconds.
constexpr int patience_ms = 120'000;
constexpr int orderly_end_ms = 1'000;
constexpr int terminated_end_ms = 10'000;  ///< Triton's server ends its own processes, and
                                           ///< removes their names

std::pair<UniqueFd, UniqueFd> pipe_ends() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error{"a pipe cannot be made"};
    return {UniqueFd{ends[0]}, UniqueFd{ends[1]}};
}

/// A write to a process that is gone fails here; to a pipe it would end this one by SIGPIPE.
std::pair<UniqueFd, UniqueFd> socket_ends() {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
        throw std::runtime_error{"a socket pair cannot be made"};
    return {UniqueFd{ends[0]}, UniqueFd{ends[1]}};
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
}

}  // namespace

Peer::Peer(std::vector<std::string> argv, const std::vector<std::string>& environment)
    : name_{std::filesystem::path{argv[argv.size() > 1 && argv[1].ends_with(".py") ? 1 : 0]}.filename()} {
    auto [rounds, to] = socket_ends();
    auto [from, answers] = pipe_ends();
    std::vector<std::string> variables = environment;  // of two of a name the first one counts
    for (char** one = environ; *one != nullptr; ++one) variables.emplace_back(*one);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, rounds.get(), 0);
    ::posix_spawn_file_actions_adddup2(&actions, answers.get(), 1);
    const int failed =
        ::posix_spawnp(&pid_, argv[0].c_str(), &actions, nullptr, pointers(argv).data(), pointers(variables).data());
    ::posix_spawn_file_actions_destroy(&actions);
    to_ = std::move(to);
    from_ = std::move(from);
    if (failed != 0) {  // await_ready finds the end of file
        pid_ = -1;
        return;
    }
    pidfd_ = UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0))};
}

Peer::Peer(Peer&& other) noexcept
    : name_{std::move(other.name_)}, pid_{std::exchange(other.pid_, -1)}, pidfd_{std::move(other.pidfd_)},
      to_{std::move(other.to_)}, from_{std::move(other.from_)} {}

Peer::~Peer() {
    if (pid_ < 0) return;
    to_.reset();
    const auto ends_within = [this](int ms) {
        pollfd entry{pidfd_.get(), POLLIN, 0};
        return ::poll(&entry, 1, ms) > 0;
    };
    if (!ends_within(orderly_end_ms)) {
        ::kill(pid_, SIGTERM);
        if (!ends_within(terminated_end_ms)) ::kill(pid_, SIGKILL);
    }
    ::waitpid(pid_, nullptr, 0);
}

void Peer::kill() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
}

std::vector<pid_t> Peer::family() const {
    if (pid_ < 0) return {};
    std::vector<pid_t> all{pid_};
    for (std::size_t i = 0; i < all.size(); ++i) {
        std::error_code ended;
        for (const auto& thread :
             std::filesystem::directory_iterator{"/proc/" + std::to_string(all[i]) + "/task", ended}) {
            std::ifstream children{thread.path() / "children"};
            for (pid_t child = 0; children >> child;) all.push_back(child);
        }
    }
    return all;
}

std::string Peer::await_ready() {
    if (pid_ < 0) return name_ + " cannot be started";
    try {
        std::uint64_t size = 0;
        read(&size, sizeof size);
        std::string why(size, '\0');
        read(why.data(), size);
        return why;
    } catch (const PeerLost& lost) {
        return lost.what();
    }
}

void Peer::start_round(std::uint64_t budget_us) {
    if (::send(to_.get(), &budget_us, sizeof budget_us, MSG_NOSIGNAL) != sizeof budget_us)
        throw PeerLost{name_ + " is gone"};
}

Peer::Round Peer::collect() {
    Round round;
    std::uint64_t count = 0;
    read(&count, sizeof count);
    round.latencies_us.resize(count);
    read(round.latencies_us.data(), count * sizeof(double));
    read(&round.begin_us, sizeof(double));
    read(&round.end_us, sizeof(double));
    read(&round.processor_us, sizeof(double));
    return round;
}

std::string Peer::status() const {
    pollfd entry{pidfd_.get(), POLLIN, 0};
    siginfo_t end{};
    if (::poll(&entry, 1, orderly_end_ms) <= 0 ||
        ::waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOWAIT) != 0)
        return {};
    return (end.si_code == CLD_EXITED ? ", with status " : ", by signal ") + std::to_string(end.si_status);
}

void Peer::read(void* to, std::size_t size) const {
    auto* at = static_cast<char*>(to);
    while (size > 0) {
        pollfd entry{from_.get(), POLLIN, 0};
        if (::poll(&entry, 1, patience_ms) <= 0) throw PeerLost{name_ + " says nothing"};
        const ssize_t got = ::read(from_.get(), at, size);
        if (got <= 0) throw PeerLost{name_ + " ended early" + status()};
        at += got;
        size -= static_cast<std::size_t>(got);
    }
}

std::string take_part(std::vector<std::string> argv, const std::function<void(Peer&)>& use,
                      const std::vector<std::string>& environment) {
    Peer peer{std::move(argv), environment};
    if (std::string why = peer.await_ready(); !why.empty()) return why;
    try {
        use(peer);
    } catch (const PeerLost& lost) {
        return lost.what();
    }
    return {};
}

double processor_us(pid_t pid) {
    clockid_t clock{};
    timespec time{};
    if (::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return 0;
    return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

}  // namespace bulkhead::bench
