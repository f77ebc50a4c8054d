#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>
#include <utility>

namespace bulkhead {

/// Mapped memory.
///
/// Owns  mapped memory: the destructor unmaps it
class Mapping {
public:
    Mapping() noexcept = default;
    /// Calls mmap. Empty if that fails, with errno set. `place` is only a hint.
    Mapping(std::size_t bytes, int protection, int flags, int fd = -1, void* place = nullptr) noexcept {
        void* const address = ::mmap(place, bytes, protection, flags, fd, 0);
        if (address != MAP_FAILED) bytes_ = {static_cast<std::byte*>(address), bytes};
    }
    Mapping(Mapping&& other) noexcept : bytes_{std::exchange(other.bytes_, {})} {}
    Mapping& operator=(Mapping&& other) noexcept {
        const Mapping previous{std::move(*this)};  // unmapped at this brace
        bytes_ = std::exchange(other.bytes_, {});
        return *this;
    }
    ~Mapping() {
        if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
    }

    explicit operator bool() const noexcept { return !bytes_.empty(); }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

private:
    std::span<std::byte> bytes_;
};

/// Returns how many bytes of a part of a mapped file are in the page cache; all if the kernel
/// does not say. `mincore` reports a file as fully cached if this user may not write it. `part`
/// begins on a page.
[[nodiscard]] std::size_t cached_bytes(std::span<std::byte> part);

}  // namespace bulkhead
