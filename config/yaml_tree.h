#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/report.h"

namespace bulkhead::config {

struct Node;
using NodeRef = std::shared_ptr<const Node>;

/// One value of a YAML document: what was written, and where. An alias shares the node of its anchor.
///
/// Built from the parser's events rather than from YAML::Node, which drops duplicate keys, follows aliases
/// into cycles and takes its nesting from the stack.
struct Node {
    enum class Kind { null, scalar, sequence, map };
    struct Entry {
        std::string key;
        Place place;  ///< of the key
        NodeRef value;
    };

    Kind kind = Kind::null;
    Place place;
    std::string text;       ///< scalar
    bool is_plain = false;  ///< unquoted: may mean a number or a boolean
    std::vector<NodeRef> items;
    std::vector<Entry> entries;  ///< in the order of the file, every key once
    std::size_t nodes = 1;       ///< this one and all below, aliases expanded
    std::size_t height = 1;

    /// For a message: `"text"`, `a list`, `a map` or `nothing`.
    [[nodiscard]] std::string shown() const;
};

/// Parses one document within the bounds of `limits.h`. Duplicate keys are reported and the first one is kept;
/// whatever else is wrong is reported too, and gives a null pointer.
[[nodiscard]] NodeRef parse_yaml(std::string_view text, Report& report);

/// The same tree from JSON that this project wrote itself; its places are empty.
[[nodiscard]] NodeRef from_json(const boost::json::value& json);

}  // namespace bulkhead::config
