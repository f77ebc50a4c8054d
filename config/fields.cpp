#include "config/fields.h"

#include <algorithm>
#include <cmath>

#include "config/limits.h"

namespace bulkhead::config {

void Value::refuse(std::string remedy) const {
    refuse(fmt::format("{} = {}", what_, node_->shown()), std::move(remedy));
}

void Value::refuse(std::string attempt, std::string remedy) const {
    if (is_invalid()) return;
    report_->add(node_->location, std::move(attempt), std::move(remedy));
}

std::optional<std::string> Value::text() const {
    if (node_->kind == Node::Kind::scalar && (!node_->is_plain || is_plain_text(node_->text))) return node_->text;
    refuse(node_->kind == Node::Kind::scalar ? "write text; put a number or a boolean in quotes to make it text"
                                             : "write text");
    return std::nullopt;
}

std::optional<std::string> Value::raw_text() const {
    if (node_->kind == Node::Kind::scalar) return node_->text;
    refuse("write text or a number");
    return std::nullopt;
}

std::optional<std::int64_t> Value::integer(std::int64_t min, std::int64_t max) const {
    const auto value = node_->is_plain ? parse_integer(node_->text) : std::nullopt;
    if (value && *value >= min && *value <= max) return value;
    refuse(min == max ? fmt::format("write {}", min) : fmt::format("write a whole number from {} to {}", min, max));
    return std::nullopt;
}

std::optional<double> Value::number() const {
    const auto value = node_->is_plain ? parse_number(node_->text) : std::nullopt;
    if (value && std::isfinite(*value)) return value;
    refuse("write a finite number");
    return std::nullopt;
}

std::optional<bool> Value::boolean() const {
    const auto value = node_->is_plain ? parse_boolean(node_->text) : std::nullopt;
    if (!value) refuse("write true or false");
    return value;
}

std::optional<std::chrono::milliseconds> Value::duration() const {
    const auto value = node_->kind == Node::Kind::scalar ? parse_duration(node_->text) : std::nullopt;
    if (!value) refuse("write a whole number and a unit, such as 250ms, 30s or 2m; at most 24h");
    return value;
}

std::optional<std::uint64_t> Value::size(std::uint64_t min, std::uint64_t max) const {
    const auto value = node_->kind == Node::Kind::scalar ? parse_size(node_->text) : std::nullopt;
    if (value && *value >= min && *value <= max) return value;
    refuse(fmt::format("write bytes or a size such as 64KiB, 4MiB or 1GiB; {} to {} bytes", min, max));
    return std::nullopt;
}

std::optional<std::vector<DimRange>> Value::shape() const {
    std::vector<DimRange> ranges;
    for (const Value& dim : items(wire::rank_max, "write a list of dimensions, such as [1, 1..256]")) {
        const auto range = dim.node().kind == Node::Kind::scalar ? parse_dim(dim.node().text) : std::nullopt;
        if (!range)
            dim.refuse("write a dimension as 512 or as a range 1..256, from 0 up; with a name, n=1..256");
        else if (range->min > range->max)
            dim.refuse(fmt::format("write the smaller end first: {}", dim_text({range->max, range->min, range->name})));
        else
            ranges.push_back(*range);
    }
    const bool ok = node_->kind == Node::Kind::sequence && ranges.size() == node_->items.size();
    return ok ? std::optional{std::move(ranges)} : std::nullopt;
}

std::optional<std::vector<std::int64_t>> Value::dims() const {
    std::vector<std::int64_t> values;
    for (const Value& dim : items(wire::rank_max, "write a list of dimensions, such as [1, 512]"))
        if (const auto value = dim.integer(0, limits::dim_max)) values.push_back(*value);
    const bool ok = node_->kind == Node::Kind::sequence && values.size() == node_->items.size();
    return ok ? std::optional{std::move(values)} : std::nullopt;
}

std::vector<Value> Value::items(std::size_t max, std::string remedy) const {
    std::vector<Value> values;
    if (node_->kind != Node::Kind::sequence)
        refuse(std::move(remedy));
    else if (node_->items.size() > max)
        refuse(fmt::format("{} has {} items", what_, node_->items.size()), fmt::format("at most {}", max));
    else
        for (std::size_t i = 0; i < node_->items.size(); ++i)
            values.emplace_back(node_->items[i], fmt::format("{}[{}]", what_, i), *report_);
    return values;
}

namespace {

/// Turns the prefix of a key into the prefix of a sentence: "deadlines." becomes "deadlines: ".
std::string before_sentence(const std::string& where) {
    return where.ends_with('.') ? where.substr(0, where.size() - 1) + ": " : where;
}

}  // namespace

Fields::Fields(const Value& map, std::string where)
    : map_{map}, where_{std::move(where)}, is_map_{map.node().kind == Node::Kind::map} {
    if (!is_map_) map.refuse("write a map: keys, each with its value");
}

std::optional<Value> Fields::take(std::string_view key) {
    asked_.push_back(key);
    const auto entry = std::ranges::find(map_.node().entries, key, &Node::Entry::key);
    if (entry == map_.node().entries.end()) return std::nullopt;
    return Value{entry->value, where_ + entry->key, map_.report()};
}

std::optional<Value> Fields::require(std::string_view key, std::string remedy) {
    auto value = take(key);
    if (!value && is_map_)
        map_.report().add(location(), fmt::format("{}missing key \"{}\"", before_sentence(where_), key),
                          std::move(remedy));
    return value;
}

void Fields::ignore(std::string_view key, std::string_view remedy) {
    if (take(key))
        map_.report().warn(*location_of(key),
                           fmt::format("{}{} no longer has an effect", before_sentence(where_), in_quotes(key)),
                           std::string{remedy});
}

std::optional<SourceLocation> Fields::location_of(std::string_view key) const {
    const auto entry = std::ranges::find(map_.node().entries, key, &Node::Entry::key);
    return entry == map_.node().entries.end() ? std::nullopt : std::optional{entry->location};
}

std::vector<Fields::Member> Fields::members() const {
    std::vector<Member> all;
    for (const Node::Entry& entry : map_.node().entries)
        all.push_back({entry.key, entry.location, Value{entry.value, where_ + entry.key, map_.report()}});
    return all;
}

void Fields::finish() {
    for (const Node::Entry& entry : map_.node().entries)
        if (std::ranges::find(asked_, entry.key) == asked_.end())
            map_.report().add(entry.location,
                              fmt::format("{}unknown key {}", before_sentence(where_), in_quotes(entry.key)),
                              suggestion(entry.key, asked_));
}

}  // namespace bulkhead::config
