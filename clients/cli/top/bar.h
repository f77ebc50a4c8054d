#pragma once

#include <cstddef>

#include "clients/cli/top/canvas.h"
#include "clients/cli/top/snapshot.h"

namespace bulkhead::cli::top {

/// Kinds of parts are told apart by fill as well as by ink: a terminal may have no colours, or no UTF-8.
struct Fills {
    const char* resident;
    const char* reserved;
    const char* reclaiming;
    const char* others;
    const char* free;

    [[nodiscard]] static Fills of(bool colours, bool utf8);
};

/// One device's memory as a bar of so many columns: each worker's part with its name as far as it fits, what others
/// use at the right end, and what is free between them. The whole bar is what the daemon may use; others are in it as
/// far as they leave less than that.
[[nodiscard]] Line bar_of(const DeviceRow& device, std::size_t columns, const Fills& fills, bool utf8);

/// So many columns for each of `bytes`, out of `columns` for `whole`: what is there has one at least, and the sum is
/// never more than there are.
[[nodiscard]] std::vector<std::size_t> share_out(const std::vector<std::uint64_t>& bytes, std::uint64_t whole,
                                                 std::size_t columns);

}  // namespace bulkhead::cli::top
