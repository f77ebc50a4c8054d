#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "config/key_rules.h"
#include "config/report.h"
#include "config/scalars.h"
#include "config/yaml_tree.h"

namespace bulkhead::config {

/// Without a value, `to` does not change.
template <typename T>
void assign(std::optional<T> value, auto& to) {
    if (value) to = std::move(*value);
}

/// One value of the tree with its name for messages, such as `model "minilm": replicas`.
///
/// Each reading function reports an invalid value and returns nothing. Reading goes on, so that all
/// errors of a file are reported at once.
class Value {
public:
    Value(NodeRef node, std::string what, Report& report)
        : node_{std::move(node)}, what_{std::move(what)}, report_{&report} {}

    [[nodiscard]] std::optional<std::string> text() const;
    /// Returns any scalar as written.
    [[nodiscard]] std::optional<std::string> raw_text() const;
    [[nodiscard]] std::optional<std::int64_t> integer(std::int64_t min, std::int64_t max) const;
    [[nodiscard]] std::optional<double> number() const;
    [[nodiscard]] std::optional<bool> boolean() const;
    [[nodiscard]] std::optional<std::chrono::milliseconds> duration() const;
    [[nodiscard]] std::optional<std::uint64_t> size(std::uint64_t min, std::uint64_t max) const;
    [[nodiscard]] std::optional<std::vector<DimRange>> shape() const;
    [[nodiscard]] std::optional<std::vector<std::int64_t>> dims() const;

    /// Writes the enumeration value of the word to `to`; false if it is none of them.
    template <typename E>
    bool word(E& to) const {
        std::array<std::string_view, words<E>.size()> known;
        for (std::size_t i = 0; i < known.size(); ++i) {
            known[i] = words<E>[i].text;
            if (node_->kind != Node::Kind::scalar || node_->text != known[i]) continue;
            to = words<E>[i].value;
            return true;
        }
        refuse(suggestion(node_->text, known));
        return false;
    }

    /// Returns the items of a list, at most `max`. `remedy` is for a value that is not a list.
    [[nodiscard]] std::vector<Value> items(std::size_t max, std::string remedy = "write a list") const;

    /// Was reported during parsing: `refuse` adds nothing.
    [[nodiscard]] bool is_invalid() const noexcept { return node_->kind == Node::Kind::invalid; }

    /// Reports `what = shown` here.
    void refuse(std::string remedy) const;
    void refuse(std::string attempt, std::string remedy) const;

    [[nodiscard]] const Node& node() const noexcept { return *node_; }
    [[nodiscard]] const NodeRef& shared() const noexcept { return node_; }
    [[nodiscard]] const std::string& what() const noexcept { return what_; }
    [[nodiscard]] Report& report() const noexcept { return *report_; }

private:
    NodeRef node_;
    std::string what_;
    Report* report_;
};

/// One map, read key by key. `finish` reports the keys that were not read as unknown.
class Fields {
public:
    struct Member {
        std::string key;
        SourceLocation location;
        Value value;
    };

    /// Messages put `where` in front of each key. Reports a value that is not a map at once.
    Fields(const Value& map, std::string where);

    [[nodiscard]] bool is_map() const noexcept { return is_map_; }
    [[nodiscard]] SourceLocation location() const noexcept { return map_.node().location; }
    [[nodiscard]] Report& report() const noexcept { return map_.report(); }

    /// Returns the value under `key`, if present.
    [[nodiscard]] std::optional<Value> take(std::string_view key);
    /// As `take`, but reports a missing key.
    [[nodiscard]] std::optional<Value> require(std::string_view key, std::string remedy);
    /// Takes a key of former releases and warns about it.
    void ignore(std::string_view key, std::string_view remedy);
    [[nodiscard]] std::optional<SourceLocation> location_of(std::string_view key) const;
    [[nodiscard]] bool has(std::string_view key) const { return location_of(key).has_value(); }

    /// Returns all members of a map whose keys are chosen by the author.
    [[nodiscard]] std::vector<Member> members() const;

    void finish();

private:
    Value map_;
    std::string where_;
    bool is_map_;
    std::vector<std::string_view> asked_;
};

}  // namespace bulkhead::config
