#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "clients/cli/text/terminal.h"
#include "clients/cli/top/frame.h"
#include "clients/cli/top/numbers.h"

namespace bulkhead::cli::top {
namespace {

struct Cell {
    std::string text;  ///< empty: unknown, or nothing to show
    Ink ink = Ink::plain;
};

struct Column {
    const char* heading;
    std::size_t width;
    bool right;
    int importance;  ///< with too few columns, the higher ones stay
    Sort sort;       ///< `fleet`: none
    bool optional;   ///< omitted if it is empty in all rows
    Cell (*cell)(const WorkerRow& row, std::int64_t now_ms);
};

Ink ink_of(std::string_view state) {
    if (state == "ready" || state == "busy") return Ink::good;
    if (state == "stopped") return Ink::dim;
    if (state == "crashed" || state == "backoff" || state == "quarantined") return Ink::bad;
    return Ink::busy;  // in transition
}

Cell number(std::uint64_t value, Ink ink = Ink::plain) { return {std::to_string(value), value == 0 ? Ink::dim : ink}; }

Cell rate(double value) { return {rate_text(value), value == 0 ? Ink::dim : Ink::plain}; }

constexpr std::array columns{
    Column{"STATE", 11, false, 99, Sort::state, false,
           [](const WorkerRow& row, std::int64_t) {
               return Cell{row.state, ink_of(row.state)};
           }},
    Column{"DEVICE", 6, false, 40, Sort::fleet, false,
           [](const WorkerRow& row, std::int64_t) {
               return Cell{row.device, Ink::dim};
           }},
    Column{"MEM", 5, true, 80, Sort::memory, false,
           [](const WorkerRow& row, std::int64_t) { return Cell{row.bytes ? size_text(*row.bytes) : ""}; }},
    Column{"ALLOC", 5, true, 14, Sort::fleet, true,
           [](const WorkerRow& row, std::int64_t) { return Cell{row.allocated ? size_text(*row.allocated) : ""}; }},
    Column{"RESV", 5, true, 15, Sort::fleet, true,
           [](const WorkerRow& row, std::int64_t) { return Cell{row.reserved ? size_text(*row.reserved) : ""}; }},
    Column{"PEAK", 5, true, 25, Sort::fleet, true,
           [](const WorkerRow& row, std::int64_t) {
               return Cell{row.peak ? size_text(*row.peak) : "", Ink::dim};
           }},
    Column{"REQ/S", 6, true, 90, Sort::requests, false,
           [](const WorkerRow& row, std::int64_t) { return rate(row.requests_per_s); }},
    Column{"TOK/S", 6, true, 65, Sort::tokens, true,
           [](const WorkerRow& row, std::int64_t) { return row.tokens_per_s ? rate(*row.tokens_per_s) : Cell{}; }},
    Column{"P50", 6, true, 35, Sort::fleet, true,
           [](const WorkerRow& row, std::int64_t) { return Cell{row.p50_ms ? latency_text(*row.p50_ms) : ""}; }},
    Column{"P99", 6, true, 60, Sort::p99, true,
           [](const WorkerRow& row, std::int64_t) { return Cell{row.p99_ms ? latency_text(*row.p99_ms) : ""}; }},
    Column{"QUEUE", 5, true, 70, Sort::queue, false,
           [](const WorkerRow& row, std::int64_t) {
               if (row.waiting > 0) return Cell{fmt::format("{}+{}", row.queued, row.waiting), Ink::busy};
               return number(row.queued, Ink::busy);
           }},
    Column{"IDLE", 5, true, 55, Sort::idle, false,
           [](const WorkerRow& row, std::int64_t now) {
               return Cell{row.is_idle() && row.since_ms ? span_text(now - *row.since_ms) : ""};
           }},
    Column{"UNLOAD", 7, true, 50, Sort::fleet, true,
           [](const WorkerRow& row, std::int64_t now) {
               if (row.pinned) return Cell{"pinned", Ink::strong};
               return Cell{row.unload_ms ? "in " + span_text(*row.unload_ms - now) : ""};
           }},
    Column{"FILES", 5, false, 20, Sort::fleet, true,
           [](const WorkerRow& row, std::int64_t) {
               return Cell{row.near, row.near == "far" ? Ink::busy : Ink::dim};
           }},
    Column{"ERR", 4, true, 28, Sort::fleet, false,
           [](const WorkerRow& row, std::int64_t) { return number(row.errors, Ink::bad); }},
    Column{"RST", 3, true, 30, Sort::fleet, false,
           [](const WorkerRow& row, std::int64_t) { return number(row.restarts, Ink::busy); }},
};
constexpr std::size_t gap = 2;

/// Selects the columns that fit beside the names.
std::vector<const Column*> fitting(const Screen& screen, std::size_t room) {
    std::vector<const Column*> chosen;
    for (const Column& column : columns) {
        const bool tells = std::ranges::any_of(screen.snapshot.workers, [&](const WorkerRow& row) {
            return !column.cell(row, screen.snapshot.time_ms).text.empty();
        });
        if (!column.optional || tells) chosen.push_back(&column);
    }
    const auto width = [&] {
        std::size_t sum = 0;
        for (const Column* column : chosen) sum += gap + column->width;
        return sum;
    };
    while (!chosen.empty() && width() > room) chosen.erase(std::ranges::min_element(chosen, {}, &Column::importance));
    return chosen;
}

void add_cell(Line& line, const Column& column, std::string_view text, Ink ink, bool utf8) {
    const std::string shown = shortened(text, column.width, utf8);
    const std::string padding(column.width - width_of(shown), ' ');
    line.add(std::string(gap, ' '));
    if (column.right) line.add(padding);
    line.add(shown, ink);
    if (!column.right) line.add(padding);
}

}  // namespace

Frame draw_table(const Screen& screen, const std::vector<const WorkerRow*>& rows, std::size_t first, std::size_t count,
                 const View& view) {
    constexpr std::size_t name_min = 8;
    const bool has_cursor = view.rows > 0;
    const std::size_t margin = has_cursor ? 2 : 0;  // for the cursor
    std::size_t name_width = name_min;
    for (const WorkerRow& row : screen.snapshot.workers) name_width = std::max(name_width, width_of(row.title()));
    name_width = std::min(name_width, std::max(name_min, view.columns / 3));
    const std::size_t taken = margin + name_width;
    const std::vector<const Column*> shown = fitting(screen, view.columns > taken ? view.columns - taken : 0);

    const std::string_view arrow = view.utf8 ? (screen.backwards ? "▴" : "▾") : (screen.backwards ? "^" : "v");
    Frame frame;
    Line heading{std::string(margin, ' ')};
    heading.add(screen.sort == Sort::name ? fmt::format("MODEL{}", arrow) : "MODEL",
                screen.sort == Sort::name ? Ink::strong : Ink::dim);
    heading.pad_to(taken);
    for (const Column* column : shown) {
        const bool sorts = column->sort == screen.sort && screen.sort != Sort::fleet;
        const std::string text = sorts && width_of(column->heading) < column->width
                                     ? fmt::format("{}{}", column->heading, arrow)
                                     : column->heading;
        add_cell(heading, *column, text, sorts ? Ink::strong : Ink::dim, view.utf8);
    }
    frame.push_back(std::move(heading));

    const std::size_t cursor = screen.chosen_row(rows);
    for (std::size_t i = first; i < std::min(rows.size(), first + count); ++i) {
        const WorkerRow& row = *rows[i];
        const bool chosen = has_cursor && i == cursor;
        Line line{chosen ? (view.utf8 ? "▸ " : "> ") : std::string(margin, ' '), Ink::strong};
        const Ink name = chosen ? Ink::strong : row.state == "stopped" ? Ink::dim : Ink::plain;
        line.add(shortened(row.title(), name_width, view.utf8), name).pad_to(taken);
        for (const Column* column : shown) {
            const Cell cell = column->cell(row, screen.snapshot.time_ms);
            const bool empty = cell.text.empty();
            add_cell(line, *column, empty ? "-" : cell.text, empty || row.state == "stopped" ? Ink::dim : cell.ink,
                     view.utf8);
        }
        frame.push_back(std::move(line));
    }
    return frame;
}

}  // namespace bulkhead::cli::top
