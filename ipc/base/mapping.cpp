#include "ipc/base/mapping.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

namespace bulkhead {

std::size_t cached_bytes(std::span<std::byte> part) {
    static const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages((part.size() + page_bytes - 1) / page_bytes);
    if (::mincore(part.data(), part.size(), pages.data()) != 0) return part.size();
    const auto there = static_cast<std::size_t>(std::ranges::count_if(pages, [](auto page) { return page & 1; }));
    return std::min(part.size(), there * page_bytes);
}

}  // namespace bulkhead
