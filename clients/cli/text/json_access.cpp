#include "clients/cli/text/json_access.h"

#include <cmath>
#include <iterator>

#include <fmt/format.h>

namespace bulkhead::cli {
namespace {

void append(std::string& text, const json::value& value);

/// `one` appends an element.
template <typename Container, typename One>
void append_all(std::string& text, const Container& all, char open, char close, One one) {
    text += open;
    for (auto at = all.begin(); at != all.end(); ++at) {
        if (at != all.begin()) text += ',';
        one(*at);
    }
    text += close;
}

void append(std::string& text, const json::value& value) {
    if (const auto* number = value.if_double(); number != nullptr && std::isfinite(*number)) {
        const std::size_t before = text.size();
        fmt::format_to(std::back_inserter(text), "{}", *number);
        if (text.find_first_of(".e", before) == text.npos) text += ".0";
    } else if (const auto* array = value.if_array()) {
        append_all(text, *array, '[', ']', [&](const json::value& one) { append(text, one); });
    } else if (const auto* object = value.if_object()) {
        append_all(text, *object, '{', '}', [&](const json::key_value_pair& one) {
            text += json::serialize(one.key());
            text += ':';
            append(text, one.value());
        });
    } else {
        text += json::serialize(value);
    }
}

}  // namespace

std::string json_text(const json::value& value) {
    std::string text;
    append(text, value);
    return text;
}

}  // namespace bulkhead::cli
