/// A fleet file: every text is read within its bounds, and what passes survives the way to a
/// worker unchanged.

#include "config/fleet_json.h"
#include "config/limits.h"
#include "config/reader.h"
#include "tests/fuzz/fuzz_input.h"

using namespace bulkhead;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text{reinterpret_cast<const char*>(data), size};
    const config::ReadFleet read = config::read_fleet_text(text, "/fuzz/fleet.yaml");
    BULKHEAD_PROMISE(read.diagnostics.size() <= config::limits::diagnostics_max + 1);
    for (const config::Diagnostic& diagnostic : read.diagnostics) {
        BULKHEAD_PROMISE(diagnostic.error.code == ErrorCode::config_invalid && !diagnostic.error.attempt.empty());
        for (const char c : diagnostic.text()) BULKHEAD_PROMISE(static_cast<unsigned char>(c) >= 0x20);
    }
    if (!read.ok()) return 0;
    for (const config::ModelSpec& model : read.fleet.models) {
        const std::string sent = boost::json::serialize(config::to_json(model));
        const auto received = config::model_from_json(boost::json::parse(sent).as_object());
        BULKHEAD_PROMISE(received.has_value() && *received == model);
    }
    return 0;
}
