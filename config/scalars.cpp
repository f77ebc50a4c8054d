#include "config/scalars.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <utility>

#include "config/limits.h"

namespace bulkhead::config {
namespace {

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }
bool is_letter(char c) noexcept { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_hex(char c) noexcept { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

template <typename T>
std::optional<T> whole_number(std::string_view text, int base = 10) {
    T value{};
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (failure != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
    return value;
}

bool only_digits(std::string_view text) { return !text.empty() && std::ranges::all_of(text, is_digit); }

using Units = std::initializer_list<std::pair<std::string_view, std::uint64_t>>;

/// "30s" is 30 times the unit's factor. Empty beyond `max`.
std::optional<std::uint64_t> parse_amount(std::string_view text, Units units, std::uint64_t max) {
    const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const auto count = whole_number<std::uint64_t>(text.substr(0, digits));
    for (const auto& [unit, factor] : units)
        if (count && text.substr(digits) == unit && *count <= max / factor) return *count * factor;
    return std::nullopt;
}

bool matches_name(std::string_view text, std::string_view first_also, std::string_view rest_also, bool digit_first) {
    if (text.empty() || text.size() > limits::name_bytes_max) return false;
    const auto allowed = [](char c, bool digits, std::string_view also) {
        return is_letter(c) || (digits && is_digit(c)) || also.find(c) != std::string_view::npos;
    };
    return allowed(text[0], digit_first, first_also) &&
           std::all_of(text.begin() + 1, text.end(), [&](char c) { return allowed(c, true, rest_also); });
}

}  // namespace

std::optional<std::int64_t> parse_integer(std::string_view text) {
    if (text.starts_with("0x")) return whole_number<std::int64_t>(text.substr(2), 16);
    if (text.starts_with("0o")) return whole_number<std::int64_t>(text.substr(2), 8);
    std::string_view digits = text;
    if (digits.starts_with('+') || digits.starts_with('-')) digits.remove_prefix(1);
    if (!only_digits(digits)) return std::nullopt;
    return whole_number<std::int64_t>(text.starts_with('+') ? digits : text);
}

std::optional<double> parse_number(std::string_view text) {
    if (const auto integer = parse_integer(text)) return static_cast<double>(*integer);
    double sign = 1;
    if (text.starts_with('+') || text.starts_with('-')) {
        sign = text[0] == '-' ? -1 : 1;
        text.remove_prefix(1);
    }
    if (text == ".inf" || text == ".Inf" || text == ".INF") return sign * std::numeric_limits<double>::infinity();
    if (text == ".nan" || text == ".NaN" || text == ".NAN") return std::numeric_limits<double>::quiet_NaN();
    // Of from_chars, what YAML allows.
    if (text.empty() || (!is_digit(text[0]) && text[0] != '.')) return std::nullopt;
    double value = std::numeric_limits<double>::infinity();
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (end != text.data() + text.size() || failure == std::errc::invalid_argument) return std::nullopt;
    return sign * value;
}

std::optional<bool> parse_boolean(std::string_view text) {
    if (text == "true" || text == "True" || text == "TRUE") return true;
    if (text == "false" || text == "False" || text == "FALSE") return false;
    return std::nullopt;
}

bool is_plain_text(std::string_view text) {
    const bool null = text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL";
    return !null && !parse_boolean(text) && !parse_number(text);
}

std::optional<std::chrono::milliseconds> parse_duration(std::string_view text) {
    const auto ms =
        parse_amount(text, {{"ms", 1}, {"s", 1'000}, {"m", 60'000}, {"h", 3'600'000}}, limits::duration_max.count());
    return ms && *ms > 0 ? std::optional{std::chrono::milliseconds{*ms}} : std::nullopt;
}

std::optional<std::uint64_t> parse_size(std::string_view text) {
    constexpr std::uint64_t kib = 1024;
    return parse_amount(text, {{"", 1}, {"KiB", kib}, {"MiB", kib * kib}, {"GiB", kib * kib * kib}},
                        std::numeric_limits<std::uint64_t>::max());
}

std::optional<DimRange> parse_dim(std::string_view text) {
    const auto end_of_range = [](std::string_view part) -> std::optional<std::int64_t> {
        const auto value = only_digits(part) ? whole_number<std::int64_t>(part) : std::nullopt;
        return value && *value <= limits::dim_max ? value : std::nullopt;
    };
    std::string name;
    if (const std::size_t equals = text.find('='); equals != std::string_view::npos) {
        name = text.substr(0, equals);
        if (!is_dim_name(name)) return std::nullopt;
        text.remove_prefix(equals + 1);
    }
    const std::size_t dots = text.find("..");
    const auto min = end_of_range(text.substr(0, dots));
    const auto max = dots == std::string_view::npos ? min : end_of_range(text.substr(dots + 2));
    if (!min || !max) return std::nullopt;
    return DimRange{*min, *max, std::move(name)};
}

std::string dim_text(const DimRange& range) {
    std::string text = range.name.empty() ? "" : range.name + "=";
    text += std::to_string(range.min);
    if (range.min != range.max) text += ".." + std::to_string(range.max);
    return text;
}

bool is_device(std::string_view text) {
    if (text == "auto" || text == "cpu") return true;
    if (text.starts_with("cuda:")) {
        text.remove_prefix(5);
        return only_digits(text) && (text.size() == 1 || (text.size() == 2 && text[0] != '0'));
    }
    constexpr std::string_view pattern = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
    return text.size() == pattern.size() &&
           std::equal(text.begin(), text.end(), pattern.begin(),
                      [](char c, char want) { return want == 'x' ? is_hex(c) : c == want; });
}

bool is_model_name(std::string_view text) { return matches_name(text, "", "._-", true); }
bool is_method_name(std::string_view text) { return matches_name(text, "_", "._-", false); }

bool is_tensor_name(std::string_view text) {
    return !text.empty() && text.size() <= limits::tensor_name_bytes_max &&
           std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

bool is_dim_name(std::string_view text) {
    return text.size() <= limits::dim_name_bytes_max && matches_name(text, "_", "_", false);
}

bool is_environment_name(std::string_view text) {
    return !text.empty() && !is_digit(text[0]) &&
           std::ranges::all_of(text, [](char c) { return is_letter(c) || is_digit(c) || c == '_'; });
}

}  // namespace bulkhead::config
