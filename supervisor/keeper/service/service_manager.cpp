#include "supervisor/keeper/service/service_manager.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>

#include "supervisor/keeper/base/say.h"

namespace bulkhead::keeper {
namespace {

std::string_view variable(const char* name) noexcept {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::optional<std::uint64_t> number_in(std::string_view text) noexcept {
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return number;
}

/// Half of the service manager's watchdog interval; zero if it does not watch this process.
Clock::duration watchdog_period() noexcept {
    const auto microseconds = number_in(variable("WATCHDOG_USEC"));
    const auto pid = variable("WATCHDOG_PID");
    if (!microseconds || *microseconds < 2 || *microseconds > INT64_MAX / 1000) return {};
    if (!pid.empty() && number_in(pid) != static_cast<std::uint64_t>(::getpid())) return {};
    return std::chrono::microseconds{*microseconds / 2};
}

}  // namespace

bool is_for_the_keeper_alone(std::string_view variable) noexcept {
    return variable.starts_with("NOTIFY_SOCKET=") || variable.starts_with("WATCHDOG_USEC=") ||
           variable.starts_with("WATCHDOG_PID=");
}

ServiceManager ServiceManager::from_environment() noexcept {
    ServiceManager manager;
    const std::string_view name = variable("NOTIFY_SOCKET");
    if (name.empty()) return manager;
    if ((name.front() != '/' && name.front() != '@') || name.size() < 2 ||
        name.size() >= sizeof manager.address_.sun_path) {
        say("WARN $NOTIFY_SOCKET is neither a path nor an abstract socket: the service manager is told nothing");
        return manager;
    }
    manager.address_.sun_family = AF_UNIX;
    std::memcpy(manager.address_.sun_path, name.data(), name.size());
    const bool abstract = name.front() == '@';
    if (abstract) manager.address_.sun_path[0] = '\0';
    // An abstract name has no terminating zero in the length; a path has one.
    manager.address_bytes_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + (abstract ? 0 : 1));
    manager.socket_ = UniqueFd{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
    if (!manager.socket_) {
        say("WARN no socket to tell the service manager: %s", strerrordesc_np(errno));
        return manager;
    }
    manager.sign_of_life_every_ = watchdog_period();
    if (manager.sign_of_life_every_ != Clock::duration::zero()) manager.next_sign_of_life_ = Clock::now();
    return manager;
}

/// Type=notify-reload requires this clock: it tells an old READY=1 from a new one.
void ServiceManager::reloading() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    std::array<char, 64> state{};
    std::snprintf(state.data(), state.size(), "RELOADING=1\nMONOTONIC_USEC=%" PRIu64 "\n",
                  static_cast<std::uint64_t>(now.tv_sec) * 1'000'000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000);
    tell(state.data(), "reading the fleet file again");
}

void ServiceManager::tell(const char* state, const char* status) noexcept {
    if (!socket_) return;
    if (*state != '\0') std::snprintf(state_.data(), state_.size(), "%s", state);
    std::snprintf(status_.data(), status_.size(), "%s", status);
    send_due(Clock::now());
}

void ServiceManager::send_due(Clock::time_point now) noexcept {
    std::array<char, sizeof state_ + sizeof status_ + sizeof "STATUS=\n"> word{};
    const int size = std::snprintf(word.data(), word.size(), "%sSTATUS=%s\n", state_.data(), status_.data());
    if (size < 0) return;
    if (send({word.data(), static_cast<std::size_t>(size)})) {
        state_.front() = '\0';
        retry_ = never;
    } else {
        retry_ = now + limits::send_retry;
    }
}

/// Returns  true if the message is dealt with; false if the receiver has no room now
bool ServiceManager::send(std::string_view text) noexcept {
    const ssize_t sent = ::sendto(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL,
                                  reinterpret_cast<const sockaddr*>(&address_), address_bytes_);
    return sent >= 0 || (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM && errno != EINTR);
}

void ServiceManager::pass_deadlines(Clock::time_point now) noexcept {
    if (retry_ <= now) send_due(now);
    if (next_sign_of_life_ > now) return;
    next_sign_of_life_ = now + (send("WATCHDOG=1\n") ? sign_of_life_every_ : Clock::duration{limits::send_retry});
}

}  // namespace bulkhead::keeper
