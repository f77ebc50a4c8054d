#include "supervisor/keeper/path_claim.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "supervisor/keeper/limits.h"

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

UniqueFd make_socket() { return UniqueFd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)}; }

/// One folder has one text, though symlinks may lead to it; it need not be there.
std::string resolved(const std::string& directory) {
    const std::size_t slash = directory.rfind('/');
    char parent[PATH_MAX];
    const bool is_known = ::realpath(slash == 0 ? "/" : directory.substr(0, slash).c_str(), parent) != nullptr;
    return is_known ? parent + directory.substr(slash) : directory;
}

/// FNV-1a: a path may be as long as a whole address.
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

PathClaim::PathClaim(const std::string& directory) : name_{name_of(directory)} {
    // Whoever held it may end between the two.
    if (!take() && !holder()) (void)take();
}

bool PathClaim::take() {
    UniqueFd socket = make_socket();
    const AbstractAddress own = address_of(name_);
    if (!socket || ::bind(socket.get(), own.get(), own.size) != 0) return false;
    if (::listen(socket.get(), limits::claim_backlog) != 0) return false;
    socket_ = std::move(socket);
    return true;
}

std::optional<pid_t> PathClaim::holder() const {
    if (socket_) return std::nullopt;
    const UniqueFd probe = make_socket();
    const AbstractAddress theirs = address_of(name_);
    ucred peer{};
    socklen_t size = sizeof peer;
    if (!probe || ::connect(probe.get(), theirs.get(), theirs.size) != 0 ||
        ::getsockopt(probe.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != ::geteuid())
        return std::nullopt;
    if (peer.pid <= 0 || (::kill(peer.pid, 0) != 0 && errno == ESRCH)) return std::nullopt;
    return peer.pid;
}

}  // namespace bulkhead::keeper
