#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>
#include <utility>

namespace bulkhead {

/// For what is not a shared slab: those are Boost.Interprocess's mapped regions.
///
/// Owns  mapped memory: the destructor unmaps it
class Mapping {
public:
    Mapping() noexcept = default;
    /// As mmap. Empty where that fails, and errno says why. `place` is a wish.
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

/// How much of a part of a mapped file is in the page cache; all of it where the kernel does not say. `mincore` calls
/// all of a file cached that this user may not write. `part` begins on a page.
[[nodiscard]] std::size_t cached_bytes(std::span<std::byte> part);

}  // namespace bulkhead
