#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/generation/engine.h"

namespace bulkhead::worker::generation {

/// The name of the method that a generating model serves besides those of its package.
inline constexpr std::string_view method_name = "generate";

/// Changes how a sequence of the same channel draws, while it runs.
inline constexpr std::string_view adjust_name = "generate.adjust";

/// What one request asks for, checked and complete.
struct GenerateParameters {
    std::vector<std::int64_t> tokens;  ///< the prompt's own copy, [T * C]: the client may write its slab meanwhile
    std::uint32_t prompt_length = 0;   ///< T
    bool tokens_tell_all = true;       ///< nothing but the tokens shapes the prompt's KV: equal ones can share it
    Sampling sampling;
    TokenRules rules;
    std::uint32_t new_max = 0;  ///< tokens to give at most: as asked, and as many as there is room for; at least 1
};

/// What admits a request: `spec` is the method as `check_inputs` knows it, the prompt's tensors in, `tokens` out.
struct Method {
    explicit Method(const Shape& of);
    const Shape& shape;  ///< the engine's
    config::MethodSpec spec;
};

/// What `welcome` says of both methods: of `generate`, besides inputs and outputs, its parameters with their defaults,
/// and the model's sizes. `package` is the folder, where a client finds the tokenizer.
[[nodiscard]] boost::json::object describe(const Method& method, const std::string& package);

/// Checks the prompt and puts its tensors into `ordered`, in the order of `Shape::inputs`. A prompt of tokens alone
/// leaves `rope` and the extras out: they become views without bytes, which mean the positions of plain text, and
/// zeros. Errors  input_invalid (missing, surplus, empty, too long, a token out of range), dtype_unsupported,
/// shape_mismatch
[[nodiscard]] Result<> read_prompt(const Method& method, std::span<const TensorView> inputs,
                                   std::vector<TensorView>& ordered, GenerateParameters& parameters);

/// Reads the parameters over the manifest's defaults; after `read_prompt`. An unseeded request gets a seed by chance.
/// Errors  input_invalid naming parameter, value and allowed range; an unknown one is answered by the known ones
[[nodiscard]] Result<> read_parameters(const Shape& shape, const boost::json::object& given,
                                       GenerateParameters& parameters);

/// Whether the manifest's defaults can be a request's parameters: known ones, each in its range. Called once, at the
/// load. Errors  input_invalid, as `read_parameters`
[[nodiscard]] Result<> check_defaults(const Shape& shape);

struct Adjustment {
    std::uint64_t request = 0;  ///< whose sequence
    Sampling sampling;
};
/// What is not given stays as in `now`, which is asked for the request's number.
/// Errors  input_invalid, as above; and `now`'s
[[nodiscard]] Result<Adjustment> read_adjustment(const Shape& shape, const boost::json::object& given,
                                                 const std::function<Result<Sampling>(std::uint64_t request)>& now);

}  // namespace bulkhead::worker::generation
