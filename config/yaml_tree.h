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
    /// invalid: it was reported where it stands, and every reader keeps quiet about it.
    enum class Kind { null, scalar, sequence, map, invalid };
    struct Entry {
        std::string key;
        SourceLocation place;  ///< of the key
        NodeRef value;
    };

    Kind kind = Kind::null;
    SourceLocation place;
    std::string text;       ///< scalar
    bool is_plain = false;  ///< unquoted: may mean a number or a boolean
    std::vector<NodeRef> items;
    std::vector<Entry> entries;  ///< in the order of the file, every key once
    std::size_t nodes = 1;       ///< this one and all below, aliases expanded
    std::size_t height = 1;

    /// For a message: `"text"`, `a list`, `a map` or `nothing`.
    [[nodiscard]] std::string shown() const;
};

/// Parses one document within the bounds of `limits.h`, and reports what is wrong. Of duplicate keys the first one is
/// kept; in place of a cycle, of an alias that expands too far, and of what is nested too deep stands an invalid node,
/// so that the rest of the file can be read. Only text that is no YAML, or has too many values of its own, gives a null
/// pointer.
[[nodiscard]] NodeRef parse_yaml(std::string_view text, Report& report);

/// The same tree from JSON that this project wrote itself; its places are empty.
[[nodiscard]] NodeRef from_json(const boost::json::value& json);

}  // namespace bulkhead::config
