"""Commands about this machine and what lies on it: doctor, plan, job, settings."""

from eyas.cli.options import add_command, add_group, at_least_0, config_of


def declare_doctor(commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        run_doctor,
        "check this machine, or whether a target is supported",
        profile=False,
    )
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="check this target instead and show its facts: 'embedded' (its folder is made when it "
        "is missing) or a folder; a folder with only a config.json is enough for the checks",
    )


def run_doctor(args) -> int:
    from eyas.doctor import doctor, screen

    if args.target:
        return _doctor_target(args.target)
    checks = doctor()
    print(screen(checks))
    return _failed(checks)


def _doctor_target(name: str) -> int:
    from eyas.doctor import screen, target_doctor

    if name == "embedded":
        from eyas.models.target import embedded_target

        embedded_target()
    checks, layer_ids = target_doctor(name)
    print(
        screen(checks, f"This target is supported; next: python -m eyas plan -p target {name}"),
        layer_ids,
        sep="\n",
    )
    has_weights = any(check.name == "weights' names" and check.ok for check in checks)
    if has_weights and not _failed(checks):
        from eyas.models.target import load_target

        print(f"Its facts:\n{load_target(name)}")
    return _failed(checks)


def _failed(checks) -> int:
    return 1 if any(check.ok is False for check in checks) else 0


def declare_plan(commands) -> None:
    parser = add_command(
        commands, "plan", run_plan, "compute size and time of an extraction, without a server"
    )
    for option, kind, what in (
        ("--tok", int, "tokens of all samples"),
        ("--samples", int, "number of samples"),
        ("--hidden-size", int, "hidden size of the target"),
        ("--blocks", int, "number of blocks of the target"),
        ("--tok-per-s", float, "rate of extraction, tokens per second"),
    ):
        parser.add_argument(
            option,
            type=at_least_0(kind),
            default=0,
            metavar="N",
            help=f"{what}, where it cannot be counted here",
        )


def run_plan(args) -> int:
    from eyas.capture.plan import Known, make_plan

    known = Known(args.tok, args.samples, args.hidden_size, args.blocks, args.tok_per_s)
    print(make_plan(config_of(args), known))
    return 0


def declare_settings(commands) -> None:
    add_command(
        commands, "settings", run_settings, "print every setting with its value and meaning"
    )


def run_settings(args) -> int:
    print(config_of(args))
    return 0


def declare_job(commands) -> None:
    job = add_group(
        commands,
        "job",
        "run a command in the background: start, list, follow, stop",
        default=job_list,
    )
    start = add_command(
        job, "start", job_start, "start a command that continues when this terminal closes"
    )
    start.add_argument("name", metavar="COMMAND", nargs="+", help="extract, train or study layers")
    add_command(job, "list", job_list, "list all jobs, with their progress", profile=False)
    for name, run, text in (
        ("follow", job_follow, "show what jobs print; Ctrl-C ends the watching, not the job"),
        ("stop", job_stop, "stop jobs as Ctrl-C would; the same command resumes them"),
    ):
        add_command(job, name, run, text).add_argument(
            "name", metavar="COMMAND", nargs="*", help="which one (default: all of the run)"
        )


def job_start(args) -> int:
    from eyas import jobs

    config = config_of(args)
    name = " ".join(args.name)
    job = jobs.start(config, name)
    print(
        f"{job} continues in the background; "
        f"next: python -m eyas job follow {name} -p run_name {config.run_name}"
    )
    return 0


def job_list(_args) -> int:
    from eyas import jobs

    print(jobs.table(jobs.list_jobs()))
    return 0


def job_follow(args) -> int:
    from eyas import jobs

    found = _jobs_of(args)
    for job in found:
        if args.name or job.state == "running":
            jobs.follow(job)
    print(jobs.table(found))
    return max((job.end()["code"] for job in found if job.state == "done"), default=0)


def job_stop(args) -> int:
    from eyas import jobs

    found = _jobs_of(args)
    for job in found:
        if jobs.stop(job):
            print(f"{job}: stopped; the same command resumes it")
        else:
            print(f"{job}: not running ({job.state})")
    if not found:
        print("no jobs")
    return 0


def _jobs_of(args) -> list:
    """Return the job that the arguments name, or all jobs of the run."""
    from eyas import jobs

    config = config_of(args)
    if args.name:
        return [jobs.find_job(config, " ".join(args.name))]
    return jobs.list_jobs(config.run_name)
