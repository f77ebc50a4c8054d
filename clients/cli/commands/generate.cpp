/// The command generate: takes token ids and prints token ids as they arrive.

#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

#include <fmt/format.h>

#include "bulkhead/channel.h"
#include "clients/cli/commands/command.h"
#include "clients/cli/tensors/inputs.h"
#include "clients/cli/tensors/json_tensor.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"
#include "config/scalars.h"

namespace bulkhead::cli {
namespace {

/// Numeric sampling parameters, by the model's names.
constexpr std::array number_options{
    std::pair{"temperature", "Of the distribution that is drawn from; 0 is greedy"},
    std::pair{"top_k", "Draw among this number of the likeliest tokens; 0: all"},
    std::pair{"top_p", "Draw among the likeliest that hold this share of the probability"},
    std::pair{"min_p", "Draw among those at least this likely, relative to the likeliest"},
    std::pair{"repetition_penalty", "Divides the logits of tokens that were there; 1: none"},
    std::pair{"ras_repeats",
              "Draw again what the last frames hold this number of times, where a model looks back; 0: off"},
    std::pair{"seed", "Of the sequence's own random stream"},
    std::pair{"max_new_tokens", "End after this number of tokens"},
    std::pair{"guidance", "Weight of classifier-free guidance, for models that have it"},
};
/// Sampling parameters that are lists of token ids.
constexpr std::array list_options{
    std::pair{"stop", "Token ids that end the sequence, in place of the model's own"},
    std::pair{"stop_also", "Token ids that end the sequence, beside the model's own"},
    std::pair{"banned", "Token ids that never come"},
    std::pair{"forced", "Token ids of the first steps"},
};

struct Generation {
    std::string model;
    std::string method = "generate";
    std::string tokens;
    std::vector<std::string> inputs;
    std::vector<std::string> parameters;
    json::object sampling;  ///< parameters with an option of their own
    std::string deadline;
    std::string client = "bulkhead generate";
};

/// Parses "1,2,3", "1 2 3" or JSON such as "[[1, 2], [3, 4]]".
std::optional<json::value> parse_ids(std::string text) {
    if (text.find('[') == std::string::npos) {
        std::string list;
        for (std::size_t at = 0; (at = text.find_first_not_of(" ,\t\n", at)) != std::string::npos;) {
            const std::size_t end = std::min(text.find_first_of(" ,\t\n", at), text.size());
            list += (list.empty() ? "" : ",") + text.substr(at, end - at);
            at = end;
        }
        text = "[" + list + "]";
    }
    boost::system::error_code failure;
    json::value value = json::parse(text, failure);
    if (failure || !value.is_array()) return std::nullopt;
    return value;
}

std::string check_ids(const std::string& text) {
    return parse_ids(text) ? std::string{} : fmt::format("\"{}\": write token ids, such as 1,2,3", text);
}

/// Parses a finite number; an integer if it is written as one.
std::optional<json::value> parse_number(const std::string& text) {
    boost::system::error_code failure;
    json::value value = json::parse(text, failure);
    if (failure || !value.is_number() || !std::isfinite(value.to_number<double>())) return std::nullopt;
    return value;
}

json::object parameters_of(const Generation& generation, const json::value& method) {
    json::object parameters = parse_parameters(generation.parameters, method).value();
    for (const auto& [name, value] : generation.sampling)
        if (!parameters.emplace(name, value).second)
            throw ErrorException{{ErrorCode::input_invalid, fmt::format("{} twice", std::string_view{name}),
                                  "give each parameter once"}};
    return parameters;
}

/// Shows tokens as they arrive, and counts them. Prints their ids; with --json one object per line.
class Shown {
public:
    explicit Shown(bool as_json) : json_{as_json} {}

    /// A token is a number, or a list of one for each codebook.
    void show(const json::value& token) {
        json_ ? print_json(json::object{{"token", token}}) : print((count_ > 0 ? " " : "") + json_text(token));
        ++count_;
    }
    void show(const json::array& tokens, std::size_t from = 0) {
        for (; from < tokens.size(); ++from) show(tokens[from]);
    }
    /// Ends the line of ids.
    void end_line() const {
        if (!json_ && count_ > 0) print("\n");
    }
    [[nodiscard]] std::size_t count() const noexcept { return count_; }

private:
    bool json_;
    std::size_t count_ = 0;
};

/// "32 tokens (stop), 26.1 tokens/s, the first after 180 ms; prompt of 7, 3 of them known already"
std::string summary(const json::object& values, std::size_t count) {
    const json::value whole(values);
    std::string text = fmt::format("{} token{} ({})", count, count == 1 ? "" : "s", text_member(whole, "finish"));
    if (const auto rate = number_member(whole, "tokens_per_second")) text += fmt::format(", {:.1f} tokens/s", *rate);
    if (const auto first = number_member(whole, "first_token_ms"))
        text += fmt::format(", the first after {}", ms_text(*first));
    if (const auto prompt = integer_member(whole, "prompt_tokens")) text += fmt::format("; prompt of {}", *prompt);
    if (const auto reused = integer_member(whole, "reused_tokens").value_or(0); reused > 0)
        text += fmt::format(", {} of them known already", reused);
    if (const auto seed = text_member(whole, "seed"); !seed.empty()) text += fmt::format("; seed {}", seed);
    return one_line(text) + "\n";
}

int finish(const Session& session, const Reply& last, Shown& shown) {
    json::array tokens;
    if (const Output* all = last.find("tokens")) tokens = to_json(all->dtype(), all->dims(), all->bytes()).as_array();
    shown.show(tokens, std::min(shown.count(), tokens.size()));
    shown.end_line();
    if (session.json) {
        json::object document{{"tokens", std::move(tokens)}};
        for (const auto& [key, value] : last.values)
            if (key != "tokens" && key != "index") document.emplace(key, value);
        return print_json(document);
    }
    std::fputs(summary(last.values, shown.count()).c_str(), stderr);
    return exit_done;
}

std::vector<Source> sources_of(const Generation& generation) {
    std::vector<Source> sources = open_sources(generation.inputs).value();
    if (generation.tokens.empty()) return sources;
    if (!generation.tokens.starts_with('@')) {
        sources.push_back({"tokens", *parse_ids(generation.tokens)});
        return sources;
    }
    Result<NpyFile> file = NpyFile::open(generation.tokens.substr(1));
    if (!file) throw ErrorException{std::move(file).error().during("--tokens")};
    sources.push_back({"tokens", std::move(*file)});
    return sources;
}

int generate(const Session& session, const Generation& generation) {
    const std::vector<Source> sources = sources_of(generation);
    ControlClient control = session.connect();
    Channel channel = Channel::open(control, generation.model, {.client = generation.client, .deadline = {}}).value();
    const json::value& method = *find_method(channel, generation.method).value();
    json::object parameters = parameters_of(generation, method);
    const Inputs inputs = fill_inputs(channel, method, sources).value();

    Request request{.method = generation.method, .inputs = inputs.named, .parameters = std::move(parameters)};
    request.deadline = config::parse_duration(generation.deadline).value_or(std::chrono::milliseconds{0});
    request.in_parts = true;
    const std::uint64_t sent = channel.submit(request).value();
    Shown shown{session.json};
    for (;;) {
        const Result<Reply> part = channel.next(sent);
        if (!part && shown.count() > 0) {
            shown.end_line();
            throw ErrorException{Error{part.error()}.during(
                fmt::format("generating with {}, after {} tokens", generation.model, shown.count()))};
        }
        if (!part.value().more) return finish(session, *part, shown);
        shown.show(array_member(json::value(part->values), "tokens"));
    }
}

}  // namespace

void add_generate(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("generate", "Let a model continue a prompt of token ids");
    const auto generation = std::make_shared<Generation>();
    // Both spellings: that of options, and that of the parameter.
    const auto names = [](std::string_view parameter) {
        std::string option{parameter};
        std::ranges::replace(option, '_', '-');
        return option == parameter ? fmt::format("--{}", option) : fmt::format("--{},--{}", option, parameter);
    };
    command->add_option("NAME", generation->model, "A model of the fleet with `runtime: generate`; loaded if need be")
        ->required();
    command->add_option("--tokens,-t", generation->tokens, "The prompt: 1,2,3 or [[1, 2], [3, 4]] or @FILE.npy")
        ->type_name("IDS")
        ->check([](const std::string& text) {
            if (text.empty()) return std::string{"it is empty: write token ids, such as 1,2,3"};
            return text.starts_with('@') ? std::string{} : check_ids(text);
        });
    const auto add = [&](const char* parameter, auto parse, const char* help) {
        return command->add_option_function<std::string>(
            names(parameter), [=](const std::string& text) { generation->sampling[parameter] = *parse(text); }, help);
    };
    for (const auto& [parameter, help] : number_options)
        add(parameter, parse_number, help)->type_name("NUMBER")->check([](const std::string& text) {
            return parse_number(text) ? std::string{} : fmt::format("\"{}\": write a finite number", text);
        });
    const auto parse_choice = [](const std::string& text) { return std::optional<json::value>{text == "true"}; };
    add("do_sample", parse_choice, "Draw (true), or take the likeliest (false)")
        ->check(CLI::IsMember({"true", "false"}));
    for (const auto& [parameter, help] : list_options)
        add(parameter, parse_ids, help)->type_name("IDS")->check(check_ids);
    command->add_flag_callback(
        names("ignore_stop"), [generation] { generation->sampling["ignore_stop"] = true; },
        "Do not end at stop tokens");
    take_assignments(command->add_option("--input,-i", generation->inputs,
                                         "A further input, such as embeddings=@FILE.npy in place of --tokens"),
                     "NAME=DATA");
    take_assignments(command->add_option("--param,-p", generation->parameters, "A parameter, JSON or text"),
                     "NAME=VALUE");
    command->add_option("--method,-m", generation->method, "The method to call")->capture_default_str();
    take_duration(
        command->add_option("--deadline", generation->deadline, "Of the whole sequence, such as 5m; 1h without it"));
    command->add_option("--client", generation->client, "Who asks, for the daemon's logs and receipts")
        ->type_name("TEXT");
    command->footer(
        "Ids come out as they are generated; how many, why it ended and how fast goes to standard error. What\n"
        "is not given is as the model's package says. Ctrl-C frees the model's slot within a step. `python -m\n"
        "bulkhead generate` does the same with text. A worker that dies ends the command with worker_lost,\n"
        "which says after how many tokens.\n"
        "With --json: {\"token\":N} a line as they come (a list with several codebooks), then one\n"
        "{\"tokens\":[…],\"finish\",\"new_tokens\",\"prompt_tokens\",\"reused_tokens\",\"first_token_ms\",\n"
        "\"tokens_per_second\"}.\n"
        "\nExamples:\n  bulkhead generate smollm2 --tokens 1,9690,198 --max-new-tokens 32\n"
        "  bulkhead generate smollm2 -t @prompt.npy --temperature 0.7 --top-p 0.9 --seed 7 --json\n"
        "\nExit status: 0 answered, 1 failed and why, 2 wrong usage, 3 no daemon answers.");
    when_chosen(command, session, [&session, generation] { return generate(session, *generation); });
}

}  // namespace bulkhead::cli
