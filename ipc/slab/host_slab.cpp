#include "ipc/slab/host_slab.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/machine_memory.h"

namespace bulkhead {
namespace {

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels answer EINVAL
#endif
constexpr unsigned memfd_huge_2mib = 21U << 26;  // MFD_HUGE_2MB of linux/memfd.h, which clashes
                                                 // with sys/mman.h
/// The kernel returns EAGAIN while another user holds a page.
constexpr int collapse_tries = 3;
constexpr std::uint64_t stat_block_bytes = 512;  // unit of st_blocks on every file system

/// Returns an address at which a mapping of whole huge pages can begin; null if the size is not a
/// multiple of them.
void* aligned_place(std::uint64_t size_bytes) {
    if (size_bytes % huge_page_bytes != 0) return nullptr;
    const Mapping room{size_bytes + huge_page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE};
    if (!room) return nullptr;
    const auto begin = reinterpret_cast<std::uintptr_t>(room.bytes().data());
    return reinterpret_cast<void*>((begin + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes);
}

Result<Mapping> map(int fd, std::uint64_t size_bytes, int protection) {
    // Populates at once: the first touch of a page costs 3 to 8 times a copy and must not
    // happen in a request.
    Mapping bytes{size_bytes, protection, MAP_SHARED | MAP_POPULATE, fd, aligned_place(size_bytes)};
    if (!bytes) return system_error(fmt::format("mapping a slab of {} bytes", size_bytes), errno);
    return bytes;
}

Error no_room(std::uint64_t size_bytes, std::string_view bound, std::uint64_t bound_bytes) {
    return {ErrorCode::resources_exhausted,
            fmt::format("creating a slab of {} bytes; {} is {} bytes", size_bytes, bound, bound_bytes),
            "send smaller tensors, or free host memory"};
}

/// Checks what fallocate would answer with the OOM killer or with SIGXFSZ.
Result<> check_room(std::uint64_t size_bytes) {
    rlimit files{};
    if (::getrlimit(RLIMIT_FSIZE, &files) == 0 && size_bytes > files.rlim_cur)
        return no_room(size_bytes, "the limit on file size (ulimit -f)", files.rlim_cur);
    if (const auto available = read_machine_memory().available; available > 0 && size_bytes > available)
        return no_room(size_bytes, "available host memory", available);
    return {};
}

/// Returns 0 or errno. Memory that runs out is an error here, not a later signal.
int allocate_pages(int memfd, std::uint64_t size_bytes) {
    int failed = 0;
    do failed = ::fallocate(memfd, 0, 0, static_cast<off_t>(size_bytes));
    while (failed != 0 && errno == EINTR);
    return failed == 0 ? 0 : errno;
}

/// Takes pages that the administrator has reserved; empty if there are not enough.
UniqueFd reserved_huge_memfd(std::uint64_t size_bytes, const std::string& label) {
    if (size_bytes % huge_page_bytes != 0) return {};
    UniqueFd memfd{::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | memfd_huge_2mib)};
    if (!memfd || allocate_pages(memfd.get(), size_bytes) != 0) return {};
    return memfd;
}

/// Turns plain pages into huge ones by copying. Returns empty on success, else why not and
/// what to change.
std::string collapse(std::span<std::byte> bytes) {
    int failed = EINVAL;  // for a size that is not a multiple
    if (bytes.size() % huge_page_bytes == 0) {
        failed = 0;
        for (int tries = 0; tries < collapse_tries; ++tries) {
            if (::madvise(bytes.data(), bytes.size(), MADV_COLLAPSE) == 0) return {};
            failed = errno;
            if (failed != EAGAIN) break;
        }
    }
    return fmt::format(
        "the kernel's reserve of huge pages has not enough for {} bytes, and collapsing plain pages failed "
        "({}); reserve them with `sysctl vm.nr_hugepages={}` or more, or take `deny` out of "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        bytes.size(), std::generic_category().message(failed),
        (bytes.size() + huge_page_bytes - 1) / huge_page_bytes);
}

constexpr int common_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

/// Moves in the order of destruction: a fork in between must not close a number that
/// has a new owner.
HostSlab& HostSlab::operator=(HostSlab&& other) noexcept {
    parents_ = std::move(other.parents_);
    bytes_ = std::move(other.bytes_);
    memfd_ = std::move(other.memfd_);
    plain_because_ = std::move(other.plain_because_);
    return *this;
}

Result<HostSlab> HostSlab::create(std::uint64_t size_bytes, wire::SlabDirection direction, const std::string& label,
                                  SlabPages pages) {
    const std::string attempt = fmt::format("creating a slab of {} bytes", size_bytes);
    if (size_bytes == 0 || size_bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max()))
        return Error{ErrorCode::input_invalid, attempt, "ask for at least one byte and at most memory has"};
    if (const Result<> room = check_room(size_bytes); !room) return room.error();

    UniqueFd memfd;
    if (pages == SlabPages::huge) memfd = reserved_huge_memfd(size_bytes, label);
    const bool has_reserved = memfd.get() >= 0;
    if (!has_reserved) {
        memfd = UniqueFd{::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)};
        if (!memfd) return system_error(attempt + ": memfd_create", errno);
        if (const int failed = allocate_pages(memfd.get(), size_bytes); failed != 0)
            return system_error(attempt + ": fallocate", failed);
    }
    Result<Mapping> bytes = map(memfd.get(), size_bytes, PROT_READ | PROT_WRITE);
    if (!bytes) return bytes.error();
    std::string plain_because;
    if (pages == SlabPages::huge && !has_reserved) plain_because = collapse(bytes->bytes());
    // After the mapping above: FUTURE_WRITE keeps it writable and forbids all later ones.
    const int seals = common_seals | (direction == wire::SlabDirection::output ? F_SEAL_FUTURE_WRITE : 0);
    if (::fcntl(memfd.get(), F_ADD_SEALS, seals) != 0) return system_error(attempt + ": sealing it", errno);
    if (::madvise(bytes->bytes().data(), size_bytes, MADV_DONTDUMP) != 0)
        return system_error(attempt + ": madvise", errno);
    HostSlab slab{std::move(memfd), std::move(*bytes)};
    slab.plain_because_ = std::move(plain_because);
    return slab;
}

Result<HostSlab> HostSlab::adopt(UniqueFd memfd, std::uint64_t size_bytes, wire::SlabDirection direction) {
    const auto refused = [&](std::string_view what) {
        return Error{ErrorCode::protocol_violation, fmt::format("adopting a slab of {} bytes: {}", size_bytes, what),
                     "offer a memfd that is sealed as docs/channel.md says"};
    };
    struct stat status {};
    if (::fstat(memfd.get(), &status) != 0) return system_error("adopting a slab: fstat", errno);
    if (!S_ISREG(status.st_mode)) return refused("the descriptor is not a memfd");
    // Before the size: only a sealed size cannot change after the check.
    const int seals = ::fcntl(memfd.get(), F_GET_SEALS);
    if (seals < 0) return refused("the descriptor is not a memfd");
    if ((seals & common_seals) != common_seals) return refused("it is not sealed against a change of size");
    const bool output = direction == wire::SlabDirection::output;
    if (output && (seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)) == 0)
        return refused("it is not sealed against writing");
    if (size_bytes == 0 || ::fstat(memfd.get(), &status) != 0 ||
        static_cast<std::uint64_t>(status.st_size) != size_bytes)
        return refused(fmt::format("the memfd has {} bytes", status.st_size));
    const std::uint64_t allocated = static_cast<std::uint64_t>(status.st_blocks) * stat_block_bytes;
    if (output && allocated < size_bytes) return refused(fmt::format("only {} of them have memory", allocated));

    Result<Mapping> bytes = map(memfd.get(), size_bytes, output ? PROT_READ : PROT_READ | PROT_WRITE);
    if (!bytes) {
        if (bytes.error().code == ErrorCode::not_permitted) return refused("it cannot be mapped for writing");
        return bytes.error();
    }
    if (::madvise(bytes->bytes().data(), size_bytes, MADV_DONTDUMP) != 0 ||
        ::madvise(bytes->bytes().data(), size_bytes, MADV_DONTFORK) != 0)
        return system_error("adopting a slab: madvise", errno);
    HostSlab slab{std::move(memfd), std::move(*bytes)};
    slab.parents_ = ClosedInChild{slab.fd(), slab.bytes()};
    return slab;
}

std::string slab_owner_prefix(std::string_view daemon_token, std::string_view model, std::uint32_t replica,
                              std::uint64_t generation) {
    return fmt::format("bulkhead:{}:{}/{}#{}:", daemon_token, model, replica, generation);
}

}  // namespace bulkhead
