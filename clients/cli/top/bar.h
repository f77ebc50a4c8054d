#pragma once

#include <cstddef>

#include "clients/cli/top/canvas.h"
#include "clients/cli/top/snapshot.h"

namespace bulkhead::cli::top {

/// Kinds of parts differ in fill as well as ink: a terminal may lack colours or UTF-8.
struct Fills {
    const char* resident;
    const char* reserved;
    const char* reclaiming;
    const char* blanks;
    const char* kept;
    const char* others;
    const char* free;

    [[nodiscard]] static Fills of(bool colours, bool utf8);
};

/// Draws one device's memory as a bar of `columns`: each worker's part, named if it fits, and
/// blanks; at the right end what is kept for others and what they use; free memory between. The
/// whole bar is what the daemon may use, and shows others only as far as they reduce that.
[[nodiscard]] Line bar_of(const DeviceRow& device, std::size_t columns, const Fills& fills, bool utf8);

/// Shares out `columns`, which stand for `whole`, over `bytes`: each non-zero entry gets at least
/// one, and the sum never exceeds `columns`.
[[nodiscard]] std::vector<std::size_t> share_out(const std::vector<std::uint64_t>& bytes, std::uint64_t whole,
                                                 std::size_t columns);

}  // namespace bulkhead::cli::top
