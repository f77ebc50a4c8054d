#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace bulkhead {

/// A descriptor that a forked child must not keep: a child that holds a channel's socket keeps it open after its
/// parent's death, one that holds a slab keeps its memory. In the child of a `fork` the number then names a socket
/// whose peer is gone: reading it ends, writing it fails, and whoever owns the number closes it as before. (In a
/// process without two free numbers: that never had a peer, and reading fails, too.)
/// `not_inherited` is a mapping marked MADV_DONTFORK: the child gets an inaccessible one in its place, so that whoever
/// unmaps it unmaps nothing else. A program that a child executes never had the descriptor: all are close-on-exec.
/// `posix_spawn` and `vfork` run no such handlers, and need none.
///
/// Owns    the registration; descriptor and mapping are their owner's, who drops this first
/// Thread  any
class ClosedInChild {
public:
    ClosedInChild() noexcept = default;
    explicit ClosedInChild(int fd, std::span<std::byte> not_inherited = {});
    ClosedInChild(ClosedInChild&& other) noexcept;
    ClosedInChild& operator=(ClosedInChild&& other) noexcept;
    ~ClosedInChild();

    /// It was registered by a parent of this process, and is closed here.
    [[nodiscard]] bool in_child() const noexcept;

private:
    int fd_ = -1;
    std::uint64_t fork_ = 0;
};

}  // namespace bulkhead
