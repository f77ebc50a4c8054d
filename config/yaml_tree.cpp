#include "config/yaml_tree.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <unordered_map>

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include "config/limits.h"
#include "ipc/base/text.h"

namespace bulkhead::config {
namespace {

/// Thrown to end a parse inside an event, after an error that makes the rest worthless.
/// Already reported.
struct Enough {};

SourceLocation location_of(const YAML::Mark& mark) { return {mark.line + 1, mark.column + 1}; }

class Builder final : public YAML::EventHandler {
public:
    explicit Builder(Report& report) : report_{report} {}

    /// Empty for a file without a value, or if the parse ended inside its first document.
    [[nodiscard]] NodeRef root() const { return root_; }

    void OnDocumentStart(const YAML::Mark& mark) override {
        if (documents_++ == 0) return;
        report_.add(location_of(mark), "a second document begins", "keep one document: remove the \"---\"");
        throw Enough{};
    }
    void OnDocumentEnd() override {}

    void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
        if (auto node = make(Node::Kind::null, mark, anchor)) close(std::move(node), anchor);
    }

    void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  const std::string& value) override {
        auto node = make(Node::Kind::scalar, mark, anchor);
        if (!node) return;
        node->text = value;
        node->is_plain = tag == "?";
        if (!check_tag(mark, tag) || !check_escapes(mark, value))
            node->kind = Node::Kind::invalid;  // without its tag its meaning is unknown
        close(std::move(node), anchor);
    }

    void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                         YAML::EmitterStyle::value /*style*/) override {
        open(Node::Kind::sequence, mark, tag, anchor);
    }
    void OnSequenceEnd() override { close_open(); }

    void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                    YAML::EmitterStyle::value /*style*/) override {
        open(Node::Kind::map, mark, tag, anchor);
    }
    void OnMapEnd() override { close_open(); }

    void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
        const SourceLocation location = location_of(mark);
        count(1, location);
        if (skipped_levels_ > 0) return;
        const auto found = anchors_.find(anchor);
        const Node* const target = found == anchors_.end() ? nullptr : found->second.get();
        if (target == nullptr) {
            report_.add(location, "an alias stands inside its own anchor: a cycle",
                        "write the value out instead of the alias");
        } else if (open_.size() + target->height > limits::nesting_max) {
            report_too_deep(location);
        } else if (nodes_ + aliased_ + target->nodes - 1 > limits::nodes_max) {
            report_too_many(location);
        } else {
            aliased_ += target->nodes - 1;
            return attach(found->second, location);
        }
        attach(node_at(location), location);
    }

private:
    struct Open {
        std::shared_ptr<Node> node;
        YAML::anchor_t anchor;
        /// A map's key whose value is still to come.
        std::optional<Node::Entry> pending{};
        /// The key is not valid: drop its value.
        bool pending_is_invalid = false;
        std::unordered_map<std::string, SourceLocation> keys_seen{};  ///< of a map
    };

    static std::shared_ptr<Node> node_at(SourceLocation location, Node::Kind kind = Node::Kind::invalid) {
        auto node = std::make_shared<Node>();
        node->kind = kind;
        node->location = location;
        return node;
    }

    void report_too_deep(SourceLocation location) {
        report_.add(location, fmt::format("nested more than {} levels deep", limits::nesting_max), "flatten the value");
    }
    /// Reports only once for a file.
    void report_too_many(SourceLocation location) {
        if (std::exchange(too_many_is_reported_, true)) return;
        report_.add(location, fmt::format("more than {} values, aliases expanded", limits::nodes_max),
                    "use fewer aliases, or split the fleet");
    }

    bool check_tag(const YAML::Mark& mark, const std::string& tag) {
        if (tag.empty() || tag == "?" || tag == "!") return true;
        report_.add(location_of(mark), "tag " + in_quotes(tag), "remove it: fleet files use no tags");
        return false;
    }

    /// yaml-cpp turns `\N` and `\_` into single bytes, and `\ud800` into a code point that
    /// does not exist.
    bool check_escapes(const YAML::Mark& mark, std::string_view value) {
        for (std::size_t at = 0, length = 0; at < value.size(); at += length) {
            length = first_character(value.substr(at)).bytes;
            if (length != 0) continue;
            report_.add(location_of(mark),
                        fmt::format("an escape that makes byte 0x{:02x}, which is not UTF-8",
                                    static_cast<unsigned char>(value[at])),
                        "write the character itself, or its code point as \\uXXXX");
            return false;
        }
        return true;
    }

    /// Bounds everything parsed, even where no node is built.
    void count(std::size_t more, SourceLocation location) {
        nodes_ += more;
        if (nodes_ <= limits::nodes_max) return;
        report_too_many(location);
        throw Enough{};
    }

    /// Returns empty while values are skipped: inside too deep nesting.
    std::shared_ptr<Node> make(Node::Kind kind, const YAML::Mark& mark, YAML::anchor_t anchor) {
        const SourceLocation location = location_of(mark);
        count(1, location);
        const bool skips = skipped_levels_ > 0;
        if (!skips && open_.size() < limits::nesting_max) return node_at(location, kind);
        const auto node = node_at(location);
        if (anchor != YAML::NullAnchor) anchors_[anchor] = node;
        if (!skips) {
            report_too_deep(location);
            attach(node, location);
        }
        return nullptr;
    }

    void open(Node::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
        auto node = make(kind, mark, anchor);
        if (!node) {
            ++skipped_levels_;
            return;
        }
        check_tag(mark, tag);  // the content means the same without the tag
        open_.push_back({std::move(node), anchor});
    }

    void close_open() {
        if (skipped_levels_ > 0) {
            --skipped_levels_;
            return;
        }
        Open done = std::move(open_.back());
        open_.pop_back();
        close(std::move(done.node), done.anchor);
    }

    void close(std::shared_ptr<Node> node, YAML::anchor_t anchor) {
        if (anchor != YAML::NullAnchor) anchors_[anchor] = node;
        const SourceLocation location = node->location;
        attach(std::move(node), location);
    }

    void attach(NodeRef node, SourceLocation location) {
        if (open_.empty()) {
            root_ = std::move(node);
            return;
        }
        Open& parent = open_.back();
        Node& into = *parent.node;
        into.nodes += node->nodes;
        into.height = std::max(into.height, node->height + 1);
        if (into.kind == Node::Kind::sequence)
            into.items.push_back(std::move(node));
        else if (!parent.pending)
            take_key(parent, *node, location);
        else
            take_value(parent, std::move(node));
    }

    void take_key(Open& map, const Node& key, SourceLocation location) {
        map.pending_is_invalid = key.kind != Node::Kind::scalar;
        if (map.pending_is_invalid && key.kind != Node::Kind::invalid)
            report_.add(location, "a key that is " + key.shown(), "use plain text as key");
        map.pending = Node::Entry{key.text, location, nullptr};
    }

    void take_value(Open& map, NodeRef value) {
        Node::Entry entry = *std::exchange(map.pending, std::nullopt);
        if (map.pending_is_invalid) return;
        entry.value = std::move(value);
        const auto [first, is_new] = map.keys_seen.emplace(entry.key, entry.location);
        if (is_new)
            map.node->entries.push_back(std::move(entry));
        else
            report_.add(entry.location, fmt::format("duplicate key {}", in_quotes(entry.key)),
                        fmt::format("keep one: the first stands at line {}", first->second.line));
    }

    Report& report_;
    NodeRef root_;
    std::vector<Open> open_;
    std::map<YAML::anchor_t, NodeRef> anchors_;
    std::size_t nodes_ = 0;           ///< written in the text
    std::size_t aliased_ = 0;         ///< additional ones through aliases
    std::size_t skipped_levels_ = 0;  ///< open lists and maps at and inside too deep nesting
    bool too_many_is_reported_ = false;
    int documents_ = 0;
};

/// Checks what yaml-cpp would accept, or report in unhelpful words.
bool check_characters(std::string_view text, Report& report) {
    SourceLocation location{1, 1};
    bool ok = true;
    bool in_indentation = true;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t length = first_character(text.substr(at)).bytes;
        if (length == 0) {
            report.add(location, fmt::format("byte 0x{:02x} is not UTF-8", static_cast<unsigned char>(text[at])),
                       "save the file as UTF-8");
            return false;
        }
        const char c = text[at];
        if (c == '\t' && in_indentation) {
            const std::size_t content = text.find_first_not_of(" \t", at);
            if (content != std::string_view::npos && text[content] != '\n' && text[content] != '#') {
                report.add(location, "a tab in the indentation", "indent with spaces");
                ok = false;
            }
            in_indentation = false;
        }
        const bool control = (static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\n' && c != '\r') || c == 0x7f;
        if (control) {
            report.add(location, fmt::format("control character 0x{:02x}", static_cast<unsigned char>(c)),
                       "remove it: a fleet file is text");
            ok = false;
        }
        if (c != ' ') in_indentation = false;
        location.column += static_cast<int>(length);
        if (c == '\n') {
            location = {location.line + 1, 1};
            in_indentation = true;
        }
        at += length;
    }
    return ok;
}

}  // namespace

std::string Node::shown() const {
    switch (kind) {
    case Kind::null: return "nothing";
    case Kind::scalar: return is_plain ? cut(text) : in_quotes(text);
    case Kind::sequence: return "a list";
    case Kind::map: return "a map";
    case Kind::invalid: break;
    }
    return "nothing";
}

NodeRef parse_yaml(std::string_view text, Report& report) {
    if (text.size() > limits::file_bytes_max) {
        report.add({1, 1}, fmt::format("{} bytes", text.size()),
                   fmt::format("a fleet file has at most {} bytes", limits::file_bytes_max));
        return nullptr;
    }
    if (!check_characters(text, report)) return nullptr;
    std::istringstream stream{std::string{text}};
    Builder builder{report};
    try {
        YAML::Parser parser{stream};
        while (parser.HandleNextDocument(builder)) {
        }
    } catch (const Enough&) {
        return builder.root();
    } catch (const YAML::Exception& syntax) {
        const SourceLocation location = syntax.mark.is_null() ? SourceLocation{1, 1} : location_of(syntax.mark);
        report.add(location, "not YAML: " + syntax.msg, "check indentation, quotes and brackets here and just above");
        return nullptr;
    }
    if (builder.root()) return builder.root();
    auto nothing = std::make_shared<Node>();  // only comments, or an empty file
    nothing->location = {1, 1};
    return nothing;
}

NodeRef from_json(const boost::json::value& json) {
    auto node = std::make_shared<Node>();
    if (const auto* object = json.if_object()) {
        node->kind = Node::Kind::map;
        for (const auto& [key, value] : *object) node->entries.push_back({std::string{key}, {}, from_json(value)});
    } else if (const auto* array = json.if_array()) {
        node->kind = Node::Kind::sequence;
        for (const auto& value : *array) node->items.push_back(from_json(value));
    } else if (const auto* text = json.if_string()) {
        node->kind = Node::Kind::scalar;
        node->text = *text;
    } else if (!json.is_null()) {
        node->kind = Node::Kind::scalar;
        node->is_plain = true;
        node->text = json.is_double() ? fmt::format("{}", json.get_double()) : boost::json::serialize(json);
    }
    return node;
}

}  // namespace bulkhead::config
