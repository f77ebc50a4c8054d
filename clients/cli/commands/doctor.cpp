/// The command that runs the Python package's graph doctor in its target's own environment.

#include <unistd.h>

#include <cerrno>

#include <boost/json.hpp>
#include <fmt/format.h>

#include "clients/cli/commands/command.h"
#include "clients/cli/commands/start_daemon.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "config/reader.h"

namespace bulkhead::cli {
namespace {

struct Examination {
    std::string target;
    std::optional<std::filesystem::path> interpreter;
    std::optional<std::filesystem::path> fleet;
    std::vector<std::string> passed;  ///< options for the doctor, in its spelling
};

/// Whether the name is a model's: it has no colon and no suffix.
bool is_model(const std::string& target) {
    return target.find(':') == std::string::npos && !std::filesystem::path{target}.has_extension();
}

std::filesystem::path fleet_file(const Session& session, const Examination& examination) {
    if (examination.fleet) return *examination.fleet;
    Result<ControlClient> control = ControlClient::connect(find_socket(session.socket));
    if (!control)
        throw ErrorException{{control.error().code, control.error().attempt,
                              "name the fleet file with --fleet, or write TARGET as file.py:function"}};
    return text_member(control->call("daemon.info", {}, limits::answer).value().result, "fleet");
}

/// Replaces a fleet model's name by its engine, and adds its options and its interpreter.
void find_model(const Session& session, Examination& examination) {
    const std::filesystem::path file = fleet_file(session, examination);
    const config::ReadFleet read = config::read_fleet(file);
    if (!read.ok())
        throw ErrorException{{ErrorCode::config_invalid, fmt::format("reading the fleet {}", file.string()),
                              "see `bulkhead validate`"}};
    const auto model = std::ranges::find(read.fleet.models, examination.target, &config::ModelSpec::name);
    if (model == read.fleet.models.end())
        throw ErrorException{{ErrorCode::model_unknown,
                              fmt::format("looking at model {} of {}", examination.target, file.string()),
                              "name a model of the fleet, or write TARGET as file.py:function"}};
    if (model->runtime != config::Runtime::python)
        throw ErrorException{{ErrorCode::input_invalid,
                              fmt::format("looking at model {}: it is compiled", model->name),
                              "`bulkhead why` quotes its failed captures; look at the code or the exported program "
                              "that it was compiled from"}};
    examination.target = model->python.engine;
    if (!examination.interpreter && !model->python.interpreter.empty())
        examination.interpreter = model->python.interpreter;
    examination.passed.insert(examination.passed.end(), {"--engine", boost::json::serialize(model->python.options)});
}

/// Replaces this process by the doctor. Returns only by an exception.
int examine(const Session& session, Examination examination) {
    if (is_model(examination.target)) find_model(session, examination);
    const std::filesystem::path start = program_folder().parent_path() / "share/bulkhead/python/bulkhead/doctor/start.py";
    if (std::error_code failure; !std::filesystem::exists(start, failure))
        throw ErrorException{{ErrorCode::config_invalid,
                              fmt::format("starting the doctor: there is no {}", start.string()),
                              "install Bulkhead's Python files beside this program"}};
    const std::string interpreter = examination.interpreter ? examination.interpreter->string() : "python3";
    std::vector<std::string> words{interpreter, start.string(), examination.target};
    words.insert(words.end(), examination.passed.begin(), examination.passed.end());
    if (session.json) words.emplace_back("--json");
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ::execvp(interpreter.c_str(), arguments.data());
    throw ErrorException{system_error(fmt::format("starting the doctor with {}", interpreter), errno)};
}

}  // namespace

void add_doctor(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("doctor", "Say where, and why, code cannot be captured as a CUDA graph");
    const auto examination = std::make_shared<Examination>();
    command->add_option("TARGET", examination->target,
                        "file.py:function, package.module:function or ...:Class, an exported program (.pt2), or a model "
                        "of the fleet with an engine in Python")
        ->required();
    const auto pass = [command, examination](const char* name, const char* type, const char* help) {
        command
            ->add_option_function<std::string>(
                name,
                [examination, name](const std::string& value) {
                    examination->passed.insert(examination->passed.end(), {name, value});
                },
                help)
            ->type_name(type);
    };
    command->add_option("--python", examination->interpreter, "The interpreter of the model's environment")
        ->type_name("PATH");
    command->add_option("--fleet", examination->fleet, "The fleet file of the model; else the daemon's")->type_name("FILE");
    pass("--inputs", "FILE.py:FACTORY", "A function that is given the device and returns the arguments");
    pass("--baseline", "FILE", "Leave out the findings that this file accepts");
    pass("--write-baseline", "FILE", "Accept all findings of this run in this file");
    pass("--deadline", "S", "Seconds after which a callable that does not return is given up (120)");
    const auto flag = [command, examination](const char* name, const char* help) {
        command->add_flag_callback(name, [examination, name] { examination->passed.emplace_back(name); }, help);
    };
    flag("--sarif", "SARIF 2.1.0, for editors and CI");
    flag("--compile", "Also what torch.compile says");
    flag("--gpu", "Also a capture on this machine's GPU, and what each finding costs there");
    command->footer(
        "Needs no GPU: the code runs with tensors that have a shape and a device, and no memory. The\n"
        "interpreter is --python, else that of the fleet's model, else python3; without a GPU it needs\n"
        "PyTorch 2.10. docs/doctor.md lists the codes. With --json: {\"findings\":[{\"code\",\"severity\",\"file\",\n"
        "\"line\",\"column\",\"function\",\"reason\",\"remedy\"}]}.\n"
        "\nExamples:\n  bulkhead doctor step.py:decode --inputs step.py:inputs\n  bulkhead doctor my-voice\n"
        "\nExit status: 0 nothing prevents capture, 1 a finding does, 2 the target could not be looked at to\n"
        "the end.");
    when_chosen(command, session, [&session, examination] { return examine(session, *examination); });
}

}  // namespace bulkhead::cli
