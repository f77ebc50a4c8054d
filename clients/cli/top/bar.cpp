#include "clients/cli/top/bar.h"

#include <algorithm>
#include <numeric>

#include "clients/cli/text/terminal.h"

namespace bulkhead::cli::top {
namespace {

std::string repeated(const char* fill, std::size_t times) {
    std::string text;
    for (std::size_t i = 0; i < times; ++i) text += fill;
    return text;
}

/// A part's label, surrounded by fill; a part under four columns has no label.
std::string labelled(const std::string& label, std::size_t columns, const char* fill, bool utf8) {
    constexpr std::size_t columns_min = 4;
    if (columns < columns_min || label.empty()) return repeated(fill, columns);
    const std::string text = shortened(label, columns - 2, utf8);
    return repeated(fill, 1) + text + repeated(fill, columns - 1 - width_of(text));
}

}  // namespace

Fills Fills::of(bool colours, bool utf8) {
    if (colours) return {" ", " ", " ", " ", " ", " ", utf8 ? "·" : "."};
    if (utf8) return {"█", "▒", "░", "▄", "╱", "▞", "·"};
    return {"=", "+", "~", "-", ":", "#", "."};
}

std::vector<std::size_t> share_out(const std::vector<std::uint64_t>& bytes, std::uint64_t whole, std::size_t columns) {
    std::vector<std::size_t> shares(bytes.size());
    if (whole == 0) return shares;
    std::uint64_t sum = 0;
    std::size_t given = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        sum += bytes[i];
        const auto until = static_cast<std::size_t>(
            static_cast<double>(std::min(sum, whole)) / static_cast<double>(whole) * static_cast<double>(columns) + 0.5);
        shares[i] = std::max<std::size_t>(until > given ? until - given : 0, bytes[i] > 0 ? 1 : 0);
        given += shares[i];
    }
    // Removes what rounding up added.
    for (; given > columns; --given) --*std::ranges::max_element(shares);
    return shares;
}

Line bar_of(const DeviceRow& device, std::size_t columns, const Fills& fills, bool utf8) {
    std::vector<std::uint64_t> bytes;
    for (const Part& part : device.parts) bytes.push_back(part.bytes);
    const std::uint64_t others = device.crowding(device.others);
    const std::size_t blanks = bytes.size();
    const std::size_t kept = blanks + 1;
    bytes.insert(bytes.end(), {device.blanks, device.crowding(device.others + device.kept()) - others, others});
    const std::vector<std::size_t> shares = share_out(bytes, device.limit, columns);

    Line line;
    bool next = false;  // alternates, so that neighbours differ
    for (std::size_t i = 0; i < device.parts.size(); ++i) {
        const Part& part = device.parts[i];
        switch (part.kind) {
        case Part::Kind::resident:
            line.add(labelled(part.label, shares[i], fills.resident, utf8), next ? Ink::resident_next : Ink::resident);
            next = !next;
            break;
        case Part::Kind::reserved:
            line.add(labelled(part.label, shares[i], fills.reserved, utf8), Ink::reserved);
            break;
        case Part::Kind::reclaiming:
            line.add(labelled(part.label, shares[i], fills.reclaiming, utf8), Ink::reclaiming);
            break;
        }
    }
    line.add(labelled("blanks", shares[blanks], fills.blanks, utf8), Ink::blanks);
    const std::size_t used = std::accumulate(shares.begin(), shares.end(), std::size_t{0});
    line.add(repeated(fills.free, columns - used), Ink::free);
    line.add(labelled("kept", shares[kept], fills.kept, utf8), Ink::kept);
    line.add(labelled("others", shares.back(), fills.others, utf8), Ink::others);
    return line;
}

}  // namespace bulkhead::cli::top
