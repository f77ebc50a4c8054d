#pragma once

/// `manifest.json` of a generation package, as `python -m bulkhead.export` writes it
/// (docs/generation.md).

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/generation/engine.h"
#include "worker/generation/slot_state.h"

namespace bulkhead::worker::generation {

/// The end of every remedy for a broken package.
inline constexpr std::string_view export_again = "export it again: python -m bulkhead.export";

struct Manifest {
    enum class RopeDelta : std::uint8_t {
        none,
        rope,   ///< prefill takes `rope` [3, T]; decode takes max(rope) + 1 - T
        prompt  ///< decode takes minus the prompt's length
    };
    struct Extra {
        std::string name;
        wire::DType dtype{};
        std::vector<std::int64_t> dims;  ///< `prompt_dim` for the dimension of the
                                         ///< prompt's positions
    };
    static constexpr std::int64_t prompt_dim = -1;
    struct Prefill {
        std::string file;
        bool embeddings = false;  ///< the prompt is [R, T, width] instead of token ids
        std::int64_t width = 0;
        wire::DType embeddings_dtype = wire::DType::float32;  ///< that of the weights
        std::uint32_t chunk_min = 2;  ///< positions that the graph takes in one call, at least ..
        std::uint32_t chunk_max = 2;  ///< .. and at most
        bool logits = false;          ///< returns the last position's logits
        std::vector<Extra> extras;
    };
    struct Decode {
        std::string file;
        std::uint32_t sequences_min = 1;
        std::uint32_t sequences_max = 1;
    };
    struct Method {
        std::string file;
        config::MethodSpec spec;
    };

    std::string torch;
    std::string device;  ///< "cpu" or "cuda"
    std::string compute_capability;
    std::vector<std::string> cpu_flags;
    wire::DType weights_dtype{};  ///< also the dtype of the computation
    wire::DType kv_dtype{};
    std::uint32_t vocabulary = 0;
    std::uint32_t codebooks = 1;
    std::uint32_t rows = 1;
    std::uint32_t length_max = 0;
    std::uint32_t length = 0;
    std::uint32_t slots = 1;
    std::uint32_t slots_max = 1;
    std::vector<std::uint32_t> buckets;
    std::uint32_t layers = 0;
    std::uint32_t heads = 0;
    std::uint32_t dim = 0;
    std::optional<Prefill> prefill;
    std::vector<Decode> decode;
    RopeDelta rope_delta = RopeDelta::none;
    std::int64_t prompt_id_min = 0;  ///< ids that a prompt of tokens may hold ..
    std::int64_t prompt_id_end = 0;  ///< .. below this one
    std::vector<std::int32_t> first_token;
    std::vector<std::int32_t> stop;
    DrawRules draw;
    boost::json::object sampling;  ///< the defaults of a request
    std::vector<Method> methods;
    std::string weights_file;
    std::uint64_t weights_bytes = 0;
    std::map<std::string, std::string> sha256;  ///< of weights and functions by file, if the
                                                ///< manifest has them
    /// File → name in the code → in the weights.
    std::map<std::string, std::map<std::string, std::string>> constants;

    /// Bytes of the KV of one position of one sequence, all layers.
    [[nodiscard]] std::uint64_t kv_bytes_per_position() const;
};

/// Parses and checks `text`. `folder` appears in errors; file names must not lead out of it.
/// Errors  package_incompatible: the field, its value, and how to export again
[[nodiscard]] Result<Manifest> parse_manifest(std::string_view text, const std::filesystem::path& folder);

/// Reads the folder's manifest. Errors  load_failed if it has none; those of `parse_manifest`
[[nodiscard]] Result<Manifest> read_manifest_of(const std::filesystem::path& folder);

/// Combines the manifest with the fleet file's choices.
/// Errors  config_invalid: more slots or positions than exported; a length at which a slot's KV on
///         a GPU would start where it cannot be written in place, with lengths that work
[[nodiscard]] Result<Shape> settle(const Manifest& manifest, const config::GenerateSpec& chosen);

}  // namespace bulkhead::worker::generation
