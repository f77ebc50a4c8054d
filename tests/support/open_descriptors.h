#pragma once

#include <cstddef>
#include <filesystem>

namespace bulkhead::test {

/// How many descriptors this process has, one for the listing itself included.
inline std::size_t open_descriptors() {
    const std::filesystem::directory_iterator listing{"/proc/self/fd"};
    return static_cast<std::size_t>(std::distance(begin(listing), end(listing)));
}

}  // namespace bulkhead::test
