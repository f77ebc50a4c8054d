#pragma once

#include "clients/cli/top/canvas.h"
#include "clients/cli/top/screen.h"

namespace bulkhead::cli::top {

/// The target of a frame.
struct View {
    std::size_t columns = 80;
    std::size_t rows = 0;  ///< 0: no limit, no cursor and no keys, for a file or a pipe
    bool colours = false;
    bool utf8 = false;
};

/// Draws a screen: at most `rows` lines of at most `columns` columns. Scrolls the table to
/// show the cursor.
[[nodiscard]] Frame draw(Screen& screen, const View& view);

/// Draws only the table: a heading, then rows [first, first + count).
[[nodiscard]] Frame draw_table(const Screen& screen, const std::vector<const WorkerRow*>& rows, std::size_t first,
                               std::size_t count, const View& view);

}  // namespace bulkhead::cli::top
