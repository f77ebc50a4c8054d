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

/// The method that a generating model serves besides its package's methods.
inline constexpr std::string_view method_name = "generate";

/// Changes how a running sequence of the same channel draws.
inline constexpr std::string_view adjust_name = "generate.adjust";

/// One request's parameters, checked and complete.
struct GenerateParameters {
    std::vector<std::int64_t> tokens;  ///< a copy of the prompt, [T * C]: the client may change its
                                       ///< slab meanwhile
    std::uint32_t prompt_length = 0;   ///< T
    bool tokens_tell_all = true;       ///< only the tokens shape the prompt's KV: equal
                                       ///< tokens can share it
    Sampling sampling;
    TokenRules rules;
    std::uint32_t new_max = 0;  ///< maximum of generated tokens: as asked, limited by the
                                ///< room; at least 1
};

/// What admission needs. `spec` is the method for `check_inputs`: the prompt's tensors
/// in, `tokens` out.
struct Method {
    explicit Method(const Shape& of);
    const Shape& shape;  ///< the engine's
    config::MethodSpec spec;
};

/// Describes both methods for `welcome`: of `generate`, besides inputs and outputs, its
/// parameters with their defaults, and the model's sizes. `package` is the folder where a client
/// finds the tokenizer.
[[nodiscard]] boost::json::object describe(const Method& method, const std::string& package);

/// Checks the prompt and puts its tensors into `ordered`, in the order of `Shape::inputs`. A prompt
/// of tokens alone leaves out `rope` and the extras: they become views without bytes, meaning plain
/// text's positions and zeros.
/// Errors  input_invalid (missing, surplus, empty, too long, a token out of range),
///         dtype_unsupported, shape_mismatch
[[nodiscard]] Result<> read_prompt(const Method& method, std::span<const TensorView> inputs,
                                   std::vector<TensorView>& ordered, GenerateParameters& parameters);

/// Reads the parameters over the manifest's defaults; call it after `read_prompt`. Picks a random
/// seed if none is given.
/// Errors  input_invalid naming parameter, value and allowed range; for an unknown parameter,
///         the known ones
[[nodiscard]] Result<> read_parameters(const Shape& shape, const boost::json::object& given,
                                       GenerateParameters& parameters);

/// Checks that the manifest's defaults are valid request parameters. Called once, at load.
/// Errors  input_invalid, as `read_parameters`
[[nodiscard]] Result<> check_defaults(const Shape& shape);

struct Adjustment {
    std::uint64_t request = 0;  ///< whose sequence
    Sampling sampling;
};
/// Reads a change of sampling. `now` returns the request's current values, which omitted
/// parameters keep.
/// Errors  input_invalid, as above; those of `now`
[[nodiscard]] Result<Adjustment> read_adjustment(const Shape& shape, const boost::json::object& given,
                                                 const std::function<Result<Sampling>(std::uint64_t request)>& now);

}  // namespace bulkhead::worker::generation
