#include "worker/link/identity.h"

#include <charconv>

#include <fmt/format.h>

namespace bulkhead::worker {
namespace {

bool parse_number(std::string_view text, auto& out) {
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, out);
    return error == std::errc{} && stopped == end && !text.empty();
}

}  // namespace

Result<Identity> Identity::parse(std::string_view text) {
    const std::size_t colon = text.find(':');
    const std::size_t hash = text.rfind('#');
    const std::size_t slash = text.substr(0, hash).rfind('/');
    Identity identity;
    const bool split = colon != text.npos && hash != text.npos && slash != text.npos && colon + 1 < slash;
    if (!split || !parse_number(text.substr(slash + 1, hash - slash - 1), identity.replica) ||
        !parse_number(text.substr(hash + 1), identity.generation))
        return Error{
            ErrorCode::config_invalid,
            fmt::format("reading BULKHEAD_WORKER \"{}\", which should be TOKEN:MODEL/REPLICA#GENERATION", text),
            "let bulkheadd start the worker"};
    identity.daemon_token = text.substr(0, colon);
    identity.model = text.substr(colon + 1, slash - colon - 1);
    return identity;
}

}  // namespace bulkhead::worker
