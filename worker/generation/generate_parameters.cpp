#include "worker/generation/generate_parameters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "worker/generation/limits.h"
#include "worker/generation/request_limits.h"
#include "worker/model/describe.h"

namespace bulkhead::worker::generation {
namespace {

namespace json = boost::json;

constexpr std::string_view known_parameters[] = {
    "banned",      "do_sample",          "forced", "guidance", "ignore_stop", "max_new_tokens", "min_p",
    "ras_repeats", "repetition_penalty", "seed",   "stop",     "stop_also",   "temperature",    "top_k",
    "top_p"};

constexpr std::string_view adjustable_parameters[] = {
    "do_sample", "guidance", "min_p", "ras_repeats", "repetition_penalty", "request", "temperature", "top_k", "top_p"};

Error invalid(std::string_view called, std::string what, std::string remedy) {
    return {ErrorCode::input_invalid, fmt::format("calling {}: {}", called, std::move(what)), std::move(remedy)};
}
Error invalid(std::string what, std::string remedy) { return invalid(method_name, std::move(what), std::move(remedy)); }

/// Reads one request's parameters, with defaults from `usual`. Remembers the first error.
class Reader {
public:
    Reader(std::string_view called, const Shape& shape, const json::object& given, const json::object& usual)
        : called_{called}, shape_{shape}, given_{given}, usual_{usual} {}

    [[nodiscard]] bool any_given(std::initializer_list<std::string_view> names) const {
        return std::ranges::any_of(names, [&](std::string_view name) { return given_.contains(name); });
    }

    [[nodiscard]] bool is_given(std::string_view name) const { return given_.contains(name); }

    /// Range (min, max] if `open`, else [min, max].
    void number(std::string_view name, double min, double max, bool open, float& to, std::string_view hint = {}) {
        const json::value* const value = find(name);
        if (value == nullptr) return;
        const double read = value->is_number() ? value->to_number<double>() : std::nan("");
        if (!std::isfinite(read) || read < min || (open && read == min) || read > max)
            return out_of_range(
                name, *value,
                fmt::format("give a number {} {} and at most {}{}", open ? "above" : "of at least", min, max, hint));
        to = static_cast<float>(read);
    }

    template <typename Integer>
    void integer(std::string_view name, std::uint64_t min, std::uint64_t max, Integer& to) {
        const json::value* const value = find(name);
        if (value == nullptr) return;
        const auto read = whole(*value);
        if (!read || *read < min || *read > max)
            return out_of_range(name, *value, fmt::format("give an integer from {} to {}", min, max));
        to = static_cast<Integer>(*read);
    }

    void boolean(std::string_view name, bool& to) {
        const json::value* const value = find(name);
        if (value == nullptr) return;
        if (!value->is_bool()) return out_of_range(name, *value, "give true or false");
        to = value->get_bool();
    }

    /// Reads one token id, or an array of them.
    void tokens(std::string_view name, std::vector<std::int32_t>& to) {
        const json::value* const value = given_.if_contains(name);
        if (value == nullptr) return;
        if (!value->is_array()) return token(name, *value, false, to);
        if (value->get_array().size() > limits::rule_tokens_max)
            return refuse(fmt::format("parameter \"{}\" has {} token ids", name, value->get_array().size()),
                          fmt::format("give at most {}", limits::rule_tokens_max));
        for (const json::value& each : value->get_array()) token(name, each, false, to);
    }

    /// Reads the first steps' tokens: one id each, or an array of C with several codebooks; null
    /// leaves one free.
    void forced(std::uint32_t steps_max, std::vector<std::int32_t>& to) {
        constexpr std::string_view name = "forced";
        const json::value* const value = given_.if_contains(name);
        if (value == nullptr) return;
        if (!value->is_array()) return out_of_range(name, *value, "give an array, an entry for each step");
        if (value->get_array().size() > steps_max)
            return refuse(fmt::format("parameter \"{}\" has {} steps", name, value->get_array().size()),
                          fmt::format("force at most the {} tokens that there is room for", steps_max));
        for (const json::value& step : value->get_array()) {
            if (shape_.codebooks == 1) {
                token(name, step, true, to);
                continue;
            }
            if (!step.is_array() || step.get_array().size() != shape_.codebooks)
                return out_of_range(name, step,
                                    fmt::format("give an array of {} ids or nulls for each step, one for each codebook",
                                                shape_.codebooks));
            for (const json::value& each : step.get_array()) token(name, each, true, to);
        }
    }

    void fault(Error error) {
        if (!fault_) fault_ = std::move(error);
    }
    void refuse(std::string what, std::string remedy) { fault(invalid(called_, std::move(what), std::move(remedy))); }
    [[nodiscard]] Result<> finish(std::span<const std::string_view> known) {
        for (const auto& member : given_)
            if (std::ranges::find(known, std::string_view{member.key()}) == known.end())
                return invalid(called_, fmt::format("it takes no parameter \"{}\"", shortened(member.key())),
                               fmt::format("its parameters: {}", fmt::join(known, ", ")));
        if (fault_) return *fault_;
        return {};
    }

private:
    /// "parameter "top_p" is 1.5"
    void out_of_range(std::string_view name, const json::value& value, std::string remedy) {
        refuse(fmt::format("parameter \"{}\" is {}", name, shortened(json::serialize(value))), std::move(remedy));
    }
    const json::value* find(std::string_view name) const {
        if (const json::value* const value = given_.if_contains(name)) return value;
        const json::value* const value = usual_.if_contains(name);
        return value == nullptr || value->is_null() ? nullptr : value;
    }
    static std::optional<std::uint64_t> whole(const json::value& value) {
        if (value.is_uint64()) return value.get_uint64();
        if (value.is_int64() && value.get_int64() >= 0) return static_cast<std::uint64_t>(value.get_int64());
        return std::nullopt;
    }
    void token(std::string_view name, const json::value& value, bool may_be_free, std::vector<std::int32_t>& to) {
        if (may_be_free && value.is_null()) return to.push_back(-1);
        const auto id = whole(value);
        if (!id || *id >= shape_.vocabulary)
            return out_of_range(
                name, value,
                fmt::format("give token ids from 0 to {}{}", shape_.vocabulary - 1, may_be_free ? ", or null" : ""));
        to.push_back(static_cast<std::int32_t>(*id));
    }

    const std::string_view called_;  ///< the method's name
    const Shape& shape_;
    const json::object& given_;
    const json::object& usual_;
    std::optional<Error> fault_;
};

void read_sampling(const Shape& shape, Reader& reader, Sampling& sampling) {
    reader.boolean("do_sample", sampling.do_sample);
    // A request that sets how to draw wants to draw; a manifest's own temperature alone does
    // not mean that.
    if (!reader.is_given("do_sample") && reader.any_given({"temperature", "top_k", "top_p", "min_p"}))
        sampling.do_sample = true;
    reader.number("temperature", 0, limits::temperature_max, false, sampling.temperature);
    reader.number("top_p", 0, 1, true, sampling.top_p, "; for greedy generation give temperature 0");
    reader.number("min_p", 0, 1, false, sampling.min_p);
    reader.number("repetition_penalty", limits::repetition_penalty_min, limits::repetition_penalty_max, false,
                  sampling.repetition_penalty);
    reader.integer("top_k", 0, std::numeric_limits<std::int32_t>::max(), sampling.top_k);
    sampling.top_k = std::min(sampling.top_k, static_cast<std::int32_t>(shape.vocabulary));
    reader.number("guidance", 0, limits::guidance_max, false, sampling.guidance);
    if (shape.rows == 1 && sampling.guidance != 0) {
        if (reader.is_given("guidance"))
            reader.refuse("parameter \"guidance\" of a model that has none", "leave it out");
        sampling.guidance = 0;
    }
    reader.integer("ras_repeats", 0, limits::ras_window_max, sampling.ras_repeats);
    if (shape.ras_window == 0 && sampling.ras_repeats != 0) {
        reader.refuse("parameter \"ras_repeats\" of a model without repetition-aware sampling", "leave it out");
        sampling.ras_repeats = 0;
    }
    if (sampling.temperature == 0) {
        if (reader.is_given("do_sample") && sampling.do_sample)
            reader.refuse("parameters \"do_sample\" true and \"temperature\" 0 contradict each other",
                          "leave one of them out: temperature 0 is greedy");
        sampling.do_sample = false;
        sampling.temperature = 1;
    } else if (!sampling.do_sample && reader.is_given("do_sample") && reader.is_given("temperature")) {
        reader.refuse("parameters \"do_sample\" false and a \"temperature\" above 0 contradict each other",
                      "leave one of them out: without sampling there is no temperature");
    }
}

/// Returns how many tokens fit behind a prompt. The last one is never fed, so it takes no position.
/// The first step feeds the last token of a prompt of tokens; after embeddings it feeds
/// `first_token`, or nothing if prefill gives the token.
std::uint32_t room_behind(const Shape& shape, std::uint32_t prompt_length) {
    const std::uint32_t taken = prompt_length + (shape.embeddings && !shape.prefill_gives ? 1 : 0);
    return taken > shape.length ? 0 : shape.length - taken + 1;
}

std::uint64_t seed_by_chance() {
    std::random_device device;
    // 53 bits: every JSON reader can represent it.
    return (std::uint64_t{device()} << 21) ^ device();
}

/// Whether the ids are a row of several codebooks: text is an id and -1 for each further codebook,
/// audio one code of each.
bool is_row(const Shape& shape, std::span<const std::int64_t> ids) {
    if (std::ranges::any_of(ids, [](std::int64_t id) { return id < 0; }))
        return ids.front() >= 0 && std::ranges::all_of(ids.subspan(1), [](std::int64_t id) { return id == -1; });
    return std::ranges::all_of(ids, [&](std::int64_t id) { return id < std::int64_t{shape.vocabulary}; });
}

/// Checks `tokens`, [T * C].
Result<> check_tokens(const Shape& shape, std::span<const std::int64_t> tokens) {
    const std::int64_t end = shape.prompt_id_end != 0 ? shape.prompt_id_end : std::int64_t{shape.vocabulary};
    const auto bad =
        std::ranges::find_if(tokens, [&](std::int64_t token) { return token < shape.prompt_id_min || token >= end; });
    if (bad != tokens.end())
        return invalid(
            fmt::format("token {} of the prompt is {}", (bad - tokens.begin()) / shape.codebooks, *bad),
            fmt::format("send ids from {} to {}: is this the model's own tokenizer?", shape.prompt_id_min, end - 1));
    if (shape.codebooks == 1) return {};
    for (std::size_t at = 0; at < tokens.size(); at += shape.codebooks)
        if (const auto row = tokens.subspan(at, shape.codebooks); !is_row(shape, row))
            return invalid(
                fmt::format("token {} of the prompt is [{}]", at / shape.codebooks, fmt::join(row, ", ")),
                shape.prompt_id_min < 0
                    ? fmt::format("a row of text is its id and {} times -1, a row of audio {} codes from 0 to {}",
                                  shape.codebooks - 1, shape.codebooks, shape.vocabulary - 1)
                    : fmt::format("send {} codes from 0 to {}", shape.codebooks, shape.vocabulary - 1));
    return {};
}

/// Checks that generated tokens follow as plain text: at one place in time, height and width,
/// behind all that was seen.
Result<> check_last_position(std::span<const std::byte> bytes) {
    std::vector<std::int64_t> rope(bytes.size() / sizeof(std::int64_t));
    std::memcpy(rope.data(), bytes.data(), bytes.size());
    const std::size_t length = rope.size() / 3;
    const std::int64_t last = std::ranges::max(rope);
    for (std::size_t row = 1; row <= 3; ++row)
        if (rope[row * length - 1] != last)
            return invalid(
                fmt::format("the last position in \"rope\" is {}, the largest {}", rope[row * length - 1], last),
                "end the prompt with text, behind every picture");
    return {};
}

}  // namespace

Method::Method(const Shape& of) : shape{of} {
    spec.name = method_name;
    spec.inputs = shape.inputs;
    config::TensorSpec tokens{"tokens", wire::DType::int64, {{1, shape.length}}};
    if (shape.codebooks > 1) tokens.shape.push_back({shape.codebooks, shape.codebooks});
    spec.outputs = {std::move(tokens)};
}

boost::json::object describe(const Method& method, const std::string& package) {
    const Shape& shape = method.shape;
    json::object description = describe_methods({&method.spec, 1}).at(method_name).as_object();
    const auto named = [&](std::span<const std::string_view> names, bool with_defaults) {
        json::array parameters;
        for (const std::string_view name : names) {
            json::object entry{{"name", name}};
            if (const json::value* const value = shape.sampling.if_contains(name); with_defaults && value != nullptr)
                entry["default"] = *value;
            parameters.push_back(std::move(entry));
        }
        return parameters;
    };
    description["parameters"] = named(known_parameters, true);
    description["package"] = package;
    description["vocabulary"] = shape.vocabulary;
    description["codebooks"] = shape.codebooks;
    description["length"] = shape.length;
    description["slots"] = shape.slots;
    description["stop"] = json::value_from(shape.stop);
    return {
        {method_name, std::move(description)},
        {adjust_name,
         {{"inputs", json::array{}}, {"parameters", named(adjustable_parameters, false)}, {"outputs", json::array{}}}}};
}

Result<> read_prompt(const Method& method, std::span<const TensorView> inputs, std::vector<TensorView>& ordered,
                     GenerateParameters& parameters) {
    const Shape& shape = method.shape;
    const std::vector<config::TensorSpec>& specs = method.spec.inputs;
    const config::TensorSpec& first = specs.front();
    const auto at_t =
        static_cast<std::size_t>(std::ranges::find(first.shape, "T", &config::DimRange::name) - first.shape.begin());
    // Lengths first: a prompt too long is the common error, and "widen the declared range"
    // would not help.
    for (const TensorView& view : inputs) {
        if (view.name != first.name || view.dims.size() != first.shape.size()) continue;
        const std::int64_t length = view.dims[at_t];
        if (length == 0) return invalid("the prompt is empty", "send at least one token");
        if (length > shape.length || room_behind(shape, static_cast<std::uint32_t>(length)) == 0)
            return invalid(fmt::format("the prompt has {} positions, and a sequence has {} with what is generated",
                                       length, shape.length),
                           "shorten the prompt, or raise `generate.length` of the model as far as its package allows");
        parameters.prompt_length = static_cast<std::uint32_t>(length);
    }

    parameters.tokens_tell_all = inputs.size() == 1 && !shape.embeddings;
    if (parameters.tokens_tell_all) {
        config::MethodSpec alone = method.spec;
        alone.inputs.resize(1);
        if (Result<> fit = check_inputs(alone, inputs, ordered); !fit) return fit;
        for (const config::TensorSpec& absent : std::span{specs}.subspan(1))
            ordered.push_back(TensorView{absent.name, absent.dtype, {}, {}});
    } else if (Result<> fit = check_inputs(method.spec, inputs, ordered); !fit) {
        return fit;
    }
    if (const auto found = std::ranges::find_if(ordered, &TensorView::on_device); found != ordered.end())
        return invalid(fmt::format("input \"{}\" lies in a GPU slab", found->name), "send a prompt in a host slab");
    const auto rope = std::ranges::find(ordered, "rope", &TensorView::name);
    if (rope != ordered.end() && !rope->bytes.empty())
        if (Result<> behind = check_last_position(rope->bytes); !behind) return behind;
    if (shape.embeddings) return {};

    const std::span<const std::byte> bytes = ordered.front().bytes;
    parameters.tokens.resize(bytes.size() / sizeof(std::int64_t));
    std::memcpy(parameters.tokens.data(), bytes.data(), bytes.size());
    return check_tokens(shape, parameters.tokens);
}

Result<> read_parameters(const Shape& shape, const boost::json::object& given, GenerateParameters& parameters) {
    Reader reader{method_name, shape, given, shape.sampling};
    const std::uint32_t room = room_behind(shape, parameters.prompt_length);
    Sampling& sampling = parameters.sampling;
    read_sampling(shape, reader, sampling);
    // Greedy too: it may later be adjusted to draw.
    sampling.seed = reader.is_given("seed") ? 0 : seed_by_chance();
    reader.integer("seed", 0, std::numeric_limits<std::uint64_t>::max(), sampling.seed);

    parameters.new_max = room;
    if (reader.is_given("max_new_tokens"))
        reader.integer("max_new_tokens", 1, shape.length, parameters.new_max);
    else if (const json::value* const usual = shape.sampling.if_contains("max_new_tokens");
             usual != nullptr && usual->is_int64() && usual->get_int64() > 0)
        parameters.new_max = static_cast<std::uint32_t>(std::min<std::int64_t>(usual->get_int64(), room));
    parameters.new_max = std::min(parameters.new_max, room);

    TokenRules& rules = parameters.rules;
    bool ignore_stop = false;
    reader.boolean("ignore_stop", ignore_stop);
    if (ignore_stop && reader.any_given({"stop", "stop_also"}))
        reader.refuse("parameter \"ignore_stop\" true beside \"stop\" or \"stop_also\"", "leave one of them out");
    if (!ignore_stop) {
        if (!reader.is_given("stop")) rules.stop = shape.stop;
        reader.tokens("stop", rules.stop);
        reader.tokens("stop_also", rules.stop);
    }
    reader.tokens("banned", rules.banned);
    reader.forced(parameters.new_max, rules.forced);
    for (const std::int32_t token : rules.banned)
        if (std::ranges::find(rules.forced, token) != rules.forced.end())
            reader.refuse(fmt::format("token {} is in \"forced\" and in \"banned\"", token),
                          "leave it out of one of them");
    if (std::set(rules.banned.begin(), rules.banned.end()).size() == shape.vocabulary)
        reader.refuse(fmt::format("parameter \"banned\" holds all {} tokens of the vocabulary", shape.vocabulary),
                      "leave at least one that can be given");
    return reader.finish(known_parameters);
}

Result<> check_defaults(const Shape& shape) {
    Shape bare = shape;
    bare.sampling.clear();
    bare.length = limits::length_max;  // the fleet file may have lowered it below the default of
                                       // `max_new_tokens`
    json::object given;
    for (const auto& [name, value] : shape.sampling)
        if (!value.is_null()) given[name] = value;
    // A generation_config may also have a temperature; `do_sample` false then means greedy.
    if (const json::value* const draws = given.if_contains("do_sample"); draws != nullptr && *draws == false)
        given.erase("do_sample");
    GenerateParameters parameters;
    parameters.prompt_length = 1;
    return read_parameters(bare, given, parameters);
}

Result<Adjustment> read_adjustment(const Shape& shape, const boost::json::object& given,
                                   const std::function<Result<Sampling>(std::uint64_t request)>& now) {
    const json::object nothing;
    Reader reader{adjust_name, shape, given, nothing};
    Adjustment adjustment;
    if (!reader.is_given("request"))
        return invalid(adjust_name, "parameter \"request\" is missing",
                       "give the number of the request whose sequence it is about");
    reader.integer("request", 1, std::numeric_limits<std::uint64_t>::max(), adjustment.request);
    if (const Result<Sampling> of_sequence = now(adjustment.request))
        adjustment.sampling = *of_sequence;
    else
        reader.fault(of_sequence.error());
    read_sampling(shape, reader, adjustment.sampling);
    if (Result<> read = reader.finish(adjustable_parameters); !read) return read.error();
    return adjustment;
}

}  // namespace bulkhead::worker::generation
