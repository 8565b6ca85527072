from headrace.cli import run

run()
