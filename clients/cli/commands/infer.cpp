/// The command infer: sends one request, once or many times.

#include <algorithm>
#include <cstdio>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bulkhead/channel.h"
#include "clients/cli/commands/command.h"
#include "clients/cli/tensors/inputs.h"
#include "clients/cli/tensors/json_tensor.h"
#include "clients/cli/tensors/npy.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"
#include "config/scalars.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::cli {
namespace {

struct Inference {
    std::string model;
    std::string method = "forward";
    std::vector<std::string> inputs;      ///< name=@file.npy or name=<json>
    std::vector<std::string> parameters;  ///< name=value
    std::vector<std::string> outputs;     ///< name=file.npy
    std::int64_t repeat = 1;
    std::string deadline;
    std::string client = "bulkhead infer";
    bool retry_safe = false;
};

/// "embedding  float32 [1, 384]  min -0.131  mean 0.0012  max 0.142  0.0131, -0.0442, …"
std::string summary(const Output& output) {
    constexpr std::size_t shown_max = 6;
    std::string text =
        fmt::format("{}  {} [{}]", one_line(output.name()), to_string(output.dtype()), fmt::join(output.dims(), ", "));
    const std::size_t size = element_size(output.dtype());
    const std::size_t count = size == 0 ? 0 : output.bytes().size() / size;
    if (count == 0 || output.dtype() == wire::DType::complex64 || output.dtype() == wire::DType::complex128)
        return text + "\n";
    const std::byte* data = output.bytes().data();
    double min = std::numeric_limits<double>::infinity();
    double max = -min;
    double sum = 0;
    std::vector<std::string> first;
    for (std::size_t i = 0; i < count; ++i) {
        const double value = number_at(output.dtype(), data + i * size);
        min = std::fmin(min, value);  // NaN affects only the mean
        max = std::fmax(max, value);
        sum += value;
        if (i < shown_max) first.push_back(fmt::format("{:.6g}", value));
    }
    if (count > shown_max) {
        first.emplace_back("…");
        text += fmt::format("  min {:.4g}  mean {:.4g}  max {:.4g}", min, sum / static_cast<double>(count), max);
    }
    return text + fmt::format("  {}\n", fmt::join(first, ", "));
}

void save_outputs(const Reply& reply, const std::vector<Assignment>& wanted) {
    for (const Assignment& output : wanted) {
        const Output* found = reply.find(output.name);
        if (found == nullptr) {
            std::vector<std::string_view> names;
            for (const Output& there : reply.outputs) names.push_back(there.name());
            throw ErrorException{{ErrorCode::input_invalid,
                                  fmt::format("--output {}: the reply has no such output", output.name),
                                  fmt::format("there are: {}", fmt::join(names, ", "))}};
        }
        write_npy(output.value, found->dtype(), found->dims(), found->bytes()).value();
    }
}

int print_reply(const Session& session, const Reply& reply, const std::vector<Assignment>& saved,
                std::vector<double> ms, std::uint64_t replays) {
    std::ranges::sort(ms);
    const std::size_t count = ms.size();
    const double median = (ms[(count - 1) / 2] + ms[count / 2]) / 2;
    const auto is_saved = [&](std::string_view name) {
        return std::any_of(saved.begin(), saved.end(), [&](const Assignment& output) { return output.name == name; });
    };
    if (session.json) {
        json::object outputs;
        for (const Output& output : reply.outputs) {
            json::object one{{"dtype", to_string(output.dtype())}, {"shape", json::value_from(output.dims())}};
            if (!is_saved(output.name())) one["data"] = to_json(output.dtype(), output.dims(), output.bytes());
            outputs[output.name()] = std::move(one);
        }
        json::object document{{"outputs", std::move(outputs)}, {"ms", median}};
        if (!reply.values.empty()) document["values"] = reply.values;
        if (count > 1)
            document["repeat"] = {
                {"count", count}, {"min_ms", ms.front()}, {"median_ms", median}, {"max_ms", ms.back()}};
        if (replays > 0) document["replays"] = replays;
        return print_json(document);
    }
    std::string text;
    for (const Output& output : reply.outputs) text += summary(output);
    for (const Assignment& output : saved)
        text += fmt::format("{} -> {}\n", one_line(output.name), one_line(output.value));
    if (!reply.values.empty()) text += one_line(json_text(reply.values)) + "\n";
    text += count == 1 ? fmt::format("{} (queued {}, in the model {})\n", ms_text(median),
                                     ms_text(static_cast<double>(reply.queued.count()) / 1000),
                                     ms_text(static_cast<double>(reply.run.count()) / 1000))
                       : fmt::format("{} requests: min {}, median {}, max {}\n", count, ms_text(ms.front()),
                                     ms_text(median), ms_text(ms.back()));
    if (replays > 0) text += fmt::format("{} of them sent once more, because the worker had died\n", replays);
    return print(text);
}

int infer(const Session& session, const Inference& inference) {
    using Clock = std::chrono::steady_clock;
    const std::vector<Source> sources = open_sources(inference.inputs).value();
    std::vector<Assignment> saved;
    for (const std::string& text : inference.outputs) saved.push_back(split(text));

    ControlClient control = session.connect();
    Channel channel = Channel::open(control, inference.model, {.client = inference.client, .deadline = {}}).value();
    const json::value& method = *find_method(channel, inference.method).value();
    json::object parameters = parse_parameters(inference.parameters, method).value();
    const Inputs inputs = fill_inputs(channel, method, sources).value();

    Request request{.method = inference.method, .inputs = inputs.named, .parameters = std::move(parameters)};
    request.retry_safe = inference.retry_safe;
    request.deadline = config::parse_duration(inference.deadline).value_or(std::chrono::milliseconds{0});
    std::vector<double> ms;
    std::optional<Reply> last;
    for (std::int64_t i = 0; i < inference.repeat; ++i) {
        last.reset();  // returns its outputs first
        const Clock::time_point start = Clock::now();
        Result<Reply> reply = channel.infer(request);
        ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
        if (!reply && i > 0)
            throw ErrorException{Error{reply.error()}.during(fmt::format("request {} of {}", i + 1, inference.repeat))};
        last = std::move(reply).value();
    }
    save_outputs(*last, saved);
    return print_reply(session, *last, saved, std::move(ms), channel.replays());
}

}  // namespace

void add_infer(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("infer", "Run a model once, or many times");
    const auto inference = std::make_shared<Inference>();
    command->add_option("NAME", inference->model, "A model of the fleet; loaded if need be")->required();
    take_assignments(command->add_option("--input,-i", inference->inputs,
                                         "An input: NAME=@FILE.npy, or NAME=JSON such as 'x=[[1, 2]]'"),
                     "NAME=DATA");
    take_assignments(
        command->add_option("--param,-p", inference->parameters, "An argument that is not a tensor, JSON or text"),
        "NAME=VALUE");
    take_assignments(command->add_option("--output,-o", inference->outputs, "Save this output as .npy"), "NAME=FILE");
    command->add_option("--method,-m", inference->method, "The method to call")->capture_default_str();
    command
        ->add_option("--repeat,-n", inference->repeat,
                     "Send the same request this number of times, one after the other")
        ->check(CLI::Range(std::int64_t{1}, limits::repeats_max));
    take_duration(command->add_option("--deadline", inference->deadline,
                                      "Of one request, such as 5s; the model's own without it"));
    command->add_flag(
        "--retry-safe", inference->retry_safe,
        "Running a request twice does no harm: if the worker dies, it is sent once more, to the next one");
    command->add_option("--client", inference->client, "Who asks, for the daemon's logs and receipts")
        ->type_name("TEXT");
    command->footer(
        "JSON inputs take their dtype from the model's description; .npy files bring theirs (little-endian, C\n"
        "order) and are read straight into the memory shared with the worker. In JSON, both ways, numbers\n"
        "that are not finite are \"NaN\", \"Infinity\" and \"-Infinity\"; complex ones come as [real, imaginary]\n"
        "and go in as .npy. Without --output the outputs are summed up in a line each. A worker that dies\n"
        "ends the command with worker_lost; with --retry-safe only if the next one dies of the same request,\n"
        "too. A model with state gets nothing twice.\n"
        "With --json: {\"outputs\":{NAME:{\"dtype\",\"shape\",\"data\"}},\"ms\"}, data as nested lists, left out\n"
        "where --output saved them; with --repeat ms is the median and \"repeat\":{\"count\",\"min_ms\",\n"
        "\"median_ms\",\"max_ms\"}; \"replays\" counts what was sent once more.\n"
        "\nExamples:\n"
        "  bulkhead infer minilm -i input_ids=@ids.npy -i attention_mask=@mask.npy -o embedding=out.npy\n"
        "  bulkhead infer minilm -i 'input_ids=[[101, 7592, 102]]' -i 'attention_mask=[[1, 1, 1]]' --json\n"
        "  bulkhead infer silero-vad -i x=@chunk.npy -p sr=16000 --repeat 1000\n"
        "\nExit status: 0 answered, 1 failed and why, 2 wrong usage, 3 no daemon answers.");
    when_chosen(command, session, [&session, inference] { return infer(session, *inference); });
}

}  // namespace bulkhead::cli
