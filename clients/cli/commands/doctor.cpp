/// The command that runs the Python package's graph doctor in its target's own environment; and its
/// findings for `why`.

#include "clients/cli/commands/doctor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include <fmt/format.h>

#include "clients/cli/commands/start_daemon.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/terminal.h"
#include "config/reader.h"
#include "ipc/base/program.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::cli {
namespace {

struct Examination {
    std::string target;
    std::optional<std::filesystem::path> interpreter;
    std::optional<std::filesystem::path> fleet;
    std::vector<std::string> passed;  ///< options for the doctor, in its spelling
};

/// Whether the target is a model's name, which may have a dot; not `file.py:function` or a file.
bool is_model(const std::string& target) {
    return target.find_first_of(":/") == std::string::npos && !target.ends_with(".py") && !target.ends_with(".pt2");
}

/// The interpreter that the daemon starts the model with.
std::filesystem::path interpreter_of(const config::ModelSpec& model) {
    if (!model.python.interpreter.empty()) return model.python.interpreter;
    std::filesystem::path beside_us = program_folder() / "python3";
    return ::access(beside_us.c_str(), X_OK) == 0 ? beside_us : std::filesystem::path{"python3"};
}

std::filesystem::path fleet_file(const Session& session, const Examination& examination) {
    if (examination.fleet) return *examination.fleet;
    Result<ControlClient> control = ControlClient::connect(find_socket(session.socket));
    if (!control)
        throw ErrorException{{control.error().code, control.error().attempt,
                              "name the fleet file with --fleet, or write TARGET as file.py:function"}};
    return text_member(control->call("daemon.info", {}, limits::answer).value().result, "fleet");
}

/// Replaces a fleet model's name by its engine; adds its options, its interpreter, and its
/// variables to this process's environment.
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
    if (!examination.interpreter) examination.interpreter = interpreter_of(*model);
    for (const auto& [name, value] : model->environment) ::setenv(name.c_str(), value.c_str(), 1);
    examination.passed.insert(examination.passed.end(), {"--engine", boost::json::serialize(model->python.options)});
}

/// The doctor's command line; the interpreter comes first.
std::vector<std::string> words_of(const Examination& examination) {
    const std::filesystem::path start = program_folder().parent_path() / "share/bulkhead/python/bulkhead/doctor/start.py";
    if (std::error_code failure; !std::filesystem::exists(start, failure))
        throw ErrorException{{ErrorCode::config_invalid,
                              fmt::format("starting the doctor: there is no {}", start.string()),
                              "install Bulkhead's Python files beside this program"}};
    const std::string interpreter = examination.interpreter ? examination.interpreter->string() : "python3";
    std::vector<std::string> words{interpreter, start.string(), examination.target};
    words.insert(words.end(), examination.passed.begin(), examination.passed.end());
    return words;
}

/// Replaces this process by the doctor. Returns only by an exception.
int examine(const Session& session, Examination examination) {
    if (is_model(examination.target)) find_model(session, examination);
    std::vector<std::string> words = words_of(examination);
    if (session.json) words.emplace_back("--json");
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ::execvp(words.front().c_str(), arguments.data());
    throw ErrorException{system_error(fmt::format("starting the doctor with {}", words.front()), errno)};
}

/// Returns what a program writes to its standard output; empty if it cannot be started.
std::string output_of(std::vector<std::string> words) {
    const UniqueFd output{::memfd_create("doctor", MFD_CLOEXEC)};
    const UniqueFd nowhere{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    if (!output || !nowhere) return {};
    words.insert(words.begin(), "env");  // finds it on PATH
    const auto pid = start({"/usr/bin/env", std::move(words), output.get(), nowhere.get(), false});
    if (!pid) return {};
    ::waitpid(*pid, nullptr, 0);
    std::string text(static_cast<std::size_t>(std::max<off_t>(::lseek(output.get(), 0, SEEK_END), 0)), '\0');
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(::pread(output.get(), text.data(), text.size(), 0), 0)));
    return text;
}

/// One line of at most `limits::quoted_characters_max` characters.
std::string shortened(const json::value& finding, std::string_view key) {
    const std::string text = one_line(text_member(finding, key));
    const std::string_view first = first_of(text, limits::quoted_characters_max);
    return first.size() < text.size() ? fmt::format("{}…", first) : text;
}

}  // namespace

std::optional<std::vector<std::string>> doctor_of(const Session& session, const std::string& model) {
    struct stat facts {};
    if (::stat(find_socket(session.socket).c_str(), &facts) != 0 || facts.st_uid != ::geteuid()) return std::nullopt;
    try {
        Examination examination{model, std::nullopt, std::nullopt, {}};
        find_model(session, examination);
        std::vector<std::string> words = words_of(examination);
        words.emplace_back("--json");
        return words;
    } catch (const ErrorException&) {
        return std::nullopt;
    }
}

json::object quoted_findings(const std::vector<std::string>& doctor) {
    ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
    (void)::nice(limits::doctor_nice);
    boost::system::error_code failure;
    const json::value document = json::parse(output_of(doctor), failure);
    const json::array& all = array_member(document, "findings");
    std::vector<json::value> findings(all.begin(), all.end());
    std::ranges::stable_sort(findings, {},  // clang 14 cannot compile a partition of the library's
                             [](const json::value& one) { return text_member(one, "severity") != "prevents_capture"; });
    const std::size_t count = std::min(findings.size(), limits::findings_quoted);
    json::array quoted;
    for (std::size_t i = 0; i < count; ++i) {
        json::object one{{"line", integer_member(findings[i], "line").value_or(0)}};
        for (const char* key : {"code", "severity", "file", "function", "reason", "remedy"})
            one[key] = shortened(findings[i], key);
        quoted.push_back(std::move(one));
    }
    json::object answer{{"findings", std::move(quoted)}, {"more", findings.size() - count}};
    if (failure)
        answer["error"] = "it gave no report";
    else if (const json::value& error = member(document, "error"); !error.is_null())
        answer["error"] = shortened(error, "attempt");
    return answer;
}

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
