#pragma once

#include <unistd.h>

#include <cstdint>

namespace bulkhead::supervisor {

/// Returns 64 random bits from the kernel. std::random_device, linked statically, would
/// need glibc 2.36.
inline std::uint64_t random_bits() noexcept {
    std::uint64_t bits = 0;
    (void)::getentropy(&bits, sizeof bits);  // fails only before Linux 3.17
    return bits;
}

}  // namespace bulkhead::supervisor
