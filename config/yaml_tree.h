#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/report.h"

namespace bulkhead::config {

struct Node;
using NodeRef = std::shared_ptr<const Node>;

/// One value of a YAML document: what was written, and where. An alias shares the node
/// of its anchor.
///
/// Built from the parser's events, not from YAML::Node, which drops duplicate keys, follows aliases
/// into cycles and recurses on the stack.
struct Node {
    /// invalid: already reported; readers say nothing about it.
    enum class Kind { null, scalar, sequence, map, invalid };
    struct Entry {
        std::string key;
        SourceLocation location;  ///< of the key
        NodeRef value;
    };

    Kind kind = Kind::null;
    SourceLocation location;
    std::string text;       ///< scalar
    bool is_plain = false;  ///< unquoted: may mean a number or a boolean
    std::vector<NodeRef> items;
    std::vector<Entry> entries;  ///< in the order of the file, every key once
    std::size_t nodes = 1;       ///< this node and all below, aliases expanded
    std::size_t height = 1;

    /// Returns a text for messages: `"text"`, `a list`, `a map` or `nothing`.
    [[nodiscard]] std::string shown() const;
};

/// Parses one document within the bounds of `limits.h` and reports errors. Keeps the first of
/// duplicate keys. Puts an invalid node in place of a cycle, of an alias that expands too far, and
/// of too deep nesting, so that the rest of the file can be read. Returns null only for text that
/// is not YAML or has too many values of its own.
[[nodiscard]] NodeRef parse_yaml(std::string_view text, Report& report);

/// Builds the same tree from JSON that this project wrote; locations are empty.
[[nodiscard]] NodeRef from_json(const boost::json::value& json);

}  // namespace bulkhead::config
