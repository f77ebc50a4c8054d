#include "supervisor/keeper/service/path_claim.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ipc/base/pidfd.h"
#include "supervisor/keeper/base/clock.h"
#include "supervisor/keeper/base/limits.h"

namespace bulkhead::keeper {
namespace {

struct AbstractAddress {
    sockaddr_un address{};
    socklen_t size = 0;
    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

AbstractAddress address_of(const std::string& name) {
    AbstractAddress result;
    result.address.sun_family = AF_UNIX;
    std::memcpy(result.address.sun_path + 1, name.data(), name.size());
    result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return result;
}

UniqueFd packet_socket() { return UniqueFd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)}; }

/// Resolves symlinks, so that one folder has one text; the folder itself need not exist.
std::string resolved(const std::string& directory) {
    const std::size_t slash = directory.rfind('/');
    const std::string name = directory.substr(slash + 1);
    char found[PATH_MAX];
    if (name.empty() || name == "." || name == "..")
        return ::realpath(directory.c_str(), found) != nullptr ? found : directory;
    const std::string parent = slash == 0 ? "/" : directory.substr(0, slash);
    if (::realpath(parent.c_str(), found) == nullptr) return directory;
    return std::string{found} + (parent == "/" ? "" : "/") + name;
}

/// Do the two names lead to one file? True also if the first may not be looked at.
bool is_same_file(const std::string& theirs, const char* own) {
    struct stat a {
    }, b{};
    if (::stat(theirs.c_str(), &a) != 0 || ::stat(own, &b) != 0) return errno == EACCES || errno == EPERM;
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// Do paths of that process lead where paths of this process lead?
bool sees_the_same_files(pid_t pid) {
    const std::string process = "/proc/" + std::to_string(pid);
    return is_same_file(process + "/ns/mnt", "/proc/self/ns/mnt") && is_same_file(process + "/root", "/");
}

/// Returns false if it still runs after `patience`.
bool wait_for_end(pid_t pid, std::chrono::milliseconds patience) {
    const UniqueFd process = pidfd_of(pid);
    return process ? ends_within(process, patience) : errno == ESRCH;
}

/// FNV-1a. Needed because a path may be as long as a whole address.
std::uint64_t hash_of(const std::string& text) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

}  // namespace

std::string PathClaim::name_of(const std::string& directory) {
    struct stat pid_namespace {};
    if (::stat("/proc/self/ns/pid", &pid_namespace) != 0) pid_namespace.st_ino = 0;
    char name[64];
    const int size = std::snprintf(name, sizeof name, "bulkhead/%u/%llx/%016llx", ::geteuid(),
                                   static_cast<unsigned long long>(pid_namespace.st_ino),
                                   static_cast<unsigned long long>(hash_of(resolved(directory))));
    return {name, static_cast<std::size_t>(size)};
}

PathClaim::PathClaim(const std::string& directory) : name_{name_of(directory)} { (void)take(); }

std::optional<pid_t> PathClaim::insist() {
    const auto until = Clock::now() + limits::claim_patience;
    for (;;) {
        if (socket_ || take()) return std::nullopt;
        const auto their_pid = holder();
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
        // A foreign holder does not count and may have ended since: try once more.
        if (!their_pid) return take() ? std::nullopt : holder();
        if (left.count() <= 0 || !wait_for_end(*their_pid, left)) return their_pid;
    }
}

bool PathClaim::answer() noexcept {
    const UniqueFd asker{::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    return asker || errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
}

bool PathClaim::take() {
    UniqueFd socket = packet_socket();
    const AbstractAddress own = address_of(name_);
    if (!socket || ::bind(socket.get(), own.get(), own.size) != 0) return false;
    if (::listen(socket.get(), limits::claim_backlog) != 0) return false;
    socket_ = std::move(socket);
    return true;
}

std::optional<pid_t> PathClaim::holder() const {
    const UniqueFd probe{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    // For a full backlog.
    const timeval patience{0, std::chrono::microseconds{limits::claim_patience}.count()};
    const AbstractAddress theirs = address_of(name_);
    ucred peer{};
    socklen_t size = sizeof peer;
    if (!probe || ::setsockopt(probe.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0 ||
        ::connect(probe.get(), theirs.get(), theirs.size) != 0 ||
        ::getsockopt(probe.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != ::geteuid())
        return std::nullopt;
    if (peer.pid <= 0 || !process_exists(peer.pid)) return std::nullopt;
    if (!sees_the_same_files(peer.pid)) return std::nullopt;
    return peer.pid;
}

}  // namespace bulkhead::keeper
