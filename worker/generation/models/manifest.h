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
#include "worker/package/package_metadata.h"

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
        std::int64_t width = 0;                               ///< of embeddings [R, T, width]
        wire::DType embeddings_dtype = wire::DType::float32;  ///< that of the weights
        std::uint32_t chunk_min = 2;  ///< positions that the graph takes in one call, at least ..
        std::uint32_t chunk_max = 2;  ///< .. and at most
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

    std::string device;           ///< "cpu" or "cuda"
    CompiledModel compiled;       ///< the metadata alone: what the functions were compiled for
    wire::DType weights_dtype{};  ///< also the dtype of the computation
    wire::DType kv_dtype{};
    Shape shape;  ///< as exported; `settle` makes it the loaded model's
    std::uint32_t length_max = 0;
    std::uint32_t slots_max = 1;
    std::uint32_t layers = 0;
    std::uint32_t heads = 0;
    std::uint32_t dim = 0;
    std::optional<Prefill> prefill;
    std::vector<Decode> decode;
    RopeDelta rope_delta = RopeDelta::none;
    DrawRules draw;
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

/// Reads and checks the folder's manifest. File names in it must not lead out of the folder.
/// Errors  load_failed if it has none; package_incompatible: the field, its value, and how to
///         export again
[[nodiscard]] Result<Manifest> read_manifest_of(const std::filesystem::path& folder);

/// Applies the fleet file's choices to the manifest's shape.
/// Errors  config_invalid: more slots or positions than exported; a length at which a slot's KV on
///         a GPU would start where it cannot be written in place, with lengths that work
[[nodiscard]] Result<> settle(Manifest& manifest, const config::GenerateSpec& chosen);

}  // namespace bulkhead::worker::generation
