#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ipc/base/closed_in_child.h"
#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "ipc/channel/wire.h"

namespace bulkhead {

/// huge: pages of 2 MiB, which need fewer page-table and TLB entries.
enum class SlabPages : std::uint8_t { plain, huge };
inline constexpr std::uint64_t huge_page_bytes = std::uint64_t{2} << 20;

/// One sealed memfd, mapped: the memory of one direction of a channel.
///
/// The worker creates it prefaulted (the first touch costs 3 to 8 times a copy), without a name in
/// any file system. The memfd's label shows in /proc/PID/maps; by it a receipt finds processes that
/// still map a slab. Both sides can write the input slab; the client can only read the output slab
/// (F_SEAL_FUTURE_WRITE once the worker has mapped it). Both are sealed against shrinking and
/// growing, so that neither side can kill the other by SIGBUS. Marked MADV_DONTDUMP.
///
/// Owns    fd and mapping; members die in reverse order: first the registration, then the bytes
/// Thread  any; not synchronised
class HostSlab {
public:
    /// Takes huge pages from the kernel's reserve, else collapses plain pages into huge ones. If
    /// both fail, the slab has plain pages and `plain_because` says why.
    /// Errors  resources_exhausted (memory, descriptors) with the size
    static Result<HostSlab> create(std::uint64_t size_bytes, wire::SlabDirection direction, const std::string& label,
                                   SlabPages pages = SlabPages::plain);

    /// The client's side. Also marked MADV_DONTFORK, and its descriptor is closed in a forked
    /// child, which must not keep the memory alive.
    /// Errors  protocol_violation if the fd is not a memfd, lacks a seal, or has another size, or
    ///         if an output slab has holes, which reading would fill with memory
    static Result<HostSlab> adopt(UniqueFd memfd, std::uint64_t size_bytes, wire::SlabDirection direction);

    HostSlab(HostSlab&&) noexcept = default;
    HostSlab& operator=(HostSlab&& other) noexcept;
    ~HostSlab() = default;

    [[nodiscard]] int fd() const noexcept { return memfd_.get(); }
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return bytes_.bytes().size(); }
    /// Why the requested huge pages could not be had, and what to change; empty otherwise.
    [[nodiscard]] const std::string& plain_because() const noexcept { return plain_because_; }
    /// Writing through the view of an adopted output slab raises SIGSEGV.
    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_.bytes(); }

private:
    HostSlab(UniqueFd memfd, Mapping bytes) : memfd_{std::move(memfd)}, bytes_{std::move(bytes)} {}
    UniqueFd memfd_;
    Mapping bytes_;
    ClosedInChild parents_;  ///< only of an adopted slab
    std::string plain_because_;
};

/// The prefix, up to the colon after the generation, of `create`'s label:
/// "bulkhead:<daemon token>:<model>/<replica>#<generation>:<channel>:<slab>".
[[nodiscard]] std::string slab_owner_prefix(std::string_view daemon_token, std::string_view model,
                                            std::uint32_t replica, std::uint64_t generation);

}  // namespace bulkhead
